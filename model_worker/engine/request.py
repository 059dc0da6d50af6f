"""What goes into the engine and what comes out of it.

First hop of a request's path: the RPC layer builds a ``GenerateRequest``; the
engine answers with ``Event`` values in the order Started, Progress*, Tokens*, Finished.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from hashlib import sha256

from prefixcache.accounting import RequestRecord


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen; the defaults mean greedy decoding.

    ``temperature`` 0 is greedy. ``top_k`` 0, ``top_p`` 1.0 and ``min_p`` 0 keep all tokens.
    ``seed`` seeds the request's own generator; None draws one. ``repetition_penalty`` looks at
    prompt and output, the other two penalties at the output alone; they and ``logit_bias``,
    (token id, bias) pairs, change the logits before a token is chosen, greedily or not.
    ``logprobs``: give each token's log-probability and those of this many best tokens; None: none.
    ``num_samples`` answers are made from one prompt, each with a generator of its own.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    num_samples: int = 1

    def of_sample(self, number: int) -> "SamplingParams":
        """The parameters with which sample ``number`` is one request alone; those of sample 0 have the same seed.

        The seed of another is the first 8 bytes of SHA-256 over seed and number, all as little-endian uint64.
        """
        if self.seed is None or number == 0:
            return replace(self, num_samples=1)
        text = self.seed.to_bytes(8, "little") + number.to_bytes(8, "little")
        return replace(self, num_samples=1, seed=int.from_bytes(sha256(text).digest()[:8], "little"))


@dataclass(frozen=True, slots=True)
class StopConditions:
    """When to stop. ``max_new_tokens`` None: what fits, at most the worker's default.

    Until there are ``min_new_tokens`` tokens, none that would end the output is chosen.
    """

    max_new_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_new_tokens: int = 0


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One request: a tokenized prompt and what to do with it. Its id is nobody else's while it waits or runs.

    One that ``only_warms`` computes the prompt's full blocks for the cache and generates nothing.
    ``timeout_s``: its caller leaves that many seconds from now, if it is not answered before.
    ``priority``, -100 to 100: higher goes first.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stopping: StopConditions = field(default_factory=StopConditions)
    cache_salt: str = ""
    bypass_prefix_cache: bool = False
    report_progress: bool = False
    only_warms: bool = False
    timeout_s: float | None = None
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Started:
    """The request was admitted and matched; ``cached_prompt_tokens_by_tier`` names ``l1`` and tiers."""

    prompt_tokens: int
    cached_prompt_tokens: int
    cached_prompt_tokens_by_tier: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Progress:
    """A block of the prompt was computed; ``processed_prompt_tokens`` counts cached ones too."""

    processed_prompt_tokens: int
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities of one generated token and, as (id, logprob), of the best tokens in its place.

    They are the model's own: from its logits in float32, before any bias, penalty or temperature.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class TokensGenerated:
    """New token ids of one sample and the text that became certain with them.

    ``logprobs`` has one for each id, if asked for. ``finish_reason`` and ``matched_stop`` come with the sample's last.
    """

    token_ids: list[int]
    text: str
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    sample: int = 0
    finish_reason: str = ""
    matched_stop: str = ""


@dataclass(frozen=True, slots=True)
class Finished:
    """All samples of the request ended well; ``record`` is complete."""

    record: RequestRecord


Event = Started | Progress | TokensGenerated | Finished
