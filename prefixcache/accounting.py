"""The one record a request leaves behind.

The engine fills it; the response's usage and timings, the statistics and the
log line are all read from it, so they cannot disagree.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace

OUTCOMES_BY_WEIGHT = ("failed", "deadline_exceeded", "cancelled", "finished")


@dataclass(slots=True)
class RequestRecord:
    """What one request was, what it cost and what the cache saved.

    Times are seconds of a monotonic clock's differences; token counts are whole
    prompts and outputs. ``outcome`` is ``finished``, ``cancelled``, ``deadline_exceeded``
    or ``failed``; ``finish_reason`` is set for ``finished`` alone.
    ``fetch_outcome`` is empty where no tier was asked, else ``absent``, ``declined`` (computing was
    estimated to be faster), ``fetched`` or ``failed``; of the cached tokens, ``fetched_tokens_by_tier``
    came from below L1.
    """

    request_id: str
    model: str = ""
    outcome: str = "running"
    finish_reason: str = ""
    matched_stop: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_prompt_tokens: int = 0
    cache_creation_tokens: int = 0
    computed_prompt_tokens: int = 0
    queue_s: float = 0.0
    lookup_s: float = 0.0
    load_s: float = 0.0
    prefill_s: float = 0.0
    ttft_s: float = 0.0
    tpot_s: float = 0.0
    total_s: float = 0.0
    saved_s: float = 0.0
    fetch_s: float = 0.0
    fetch_outcome: str = ""
    fetch_estimate_s: float | None = None
    compute_estimate_s: float | None = None
    fetched_tokens_by_tier: dict[str, int] = field(default_factory=dict)

    @property
    def cached_prompt_tokens_by_tier(self) -> dict[str, int]:
        """The cached tokens by where this request found them: ``l1`` and the names of tiers."""
        in_memory = self.cached_prompt_tokens - sum(self.fetched_tokens_by_tier.values())
        return {"l1": in_memory, **self.fetched_tokens_by_tier} if in_memory > 0 else dict(self.fetched_tokens_by_tier)

    def log_fields(self) -> dict[str, object]:
        """The record as a dictionary for one log line: times rounded to microseconds, nothing that is not known."""
        fields = {k: round(v, 6) if isinstance(v, float) else v for k, v in asdict(self).items()}
        return {k: v for k, v in fields.items() if v is not None and v != {}}


def combine(samples: Sequence[RequestRecord]) -> RequestRecord:
    """The record of a request from those of its samples, the first first; of one sample its own.

    The prompt, the cache's part in it and the times to and between tokens are the first
    sample's; completion tokens, work and what was cached are summed; the end is the last one's.
    """
    first = samples[0]
    if len(samples) == 1:
        return first
    outcomes = {record.outcome for record in samples}
    return replace(
        first,
        outcome=next(outcome for outcome in OUTCOMES_BY_WEIGHT if outcome in outcomes),
        completion_tokens=sum(record.completion_tokens for record in samples),
        cache_creation_tokens=sum(record.cache_creation_tokens for record in samples),
        computed_prompt_tokens=sum(record.computed_prompt_tokens for record in samples),
        prefill_s=sum(record.prefill_s for record in samples),
        total_s=max(record.total_s for record in samples),
    )
