"""One request while the engine works on it.

Owner: the engine's loop. The model thread sees a sequence's slot and sampler only,
inside the step it was given.
"""

import asyncio
from collections import deque
from dataclasses import replace
from enum import Enum
from typing import TypeVar

from model_worker.engine.canonical import CanonicalRun
from model_worker.engine.output import OutputText
from model_worker.engine.request import Event, GenerateRequest, Progress, TokensGenerated
from model_worker.engine.sampler import Sampler
from model_worker.kv.slots import ParkedKv
from prefixcache.accounting import RequestRecord
from prefixcache.errors import PrefixCacheError

DEADLINE_SLACK_S = 0.1
_Event = TypeVar("_Event", bound=TokensGenerated | Progress)


class Phase(Enum):
    """Where a sequence is on its path."""

    WAITING = "waiting"
    FETCH = "fetch"
    READY = "ready"
    PREFILL = "prefill"
    DECODE = "decode"
    PARKED = "parked"
    ENDED = "ended"


class Mailbox:
    """Events on their way to the one reader of a request.

    Holds at most one event per prompt block and generated token; tokens of a sample that
    pile up at a slow reader are joined into one event, of progress it gets the newest.
    """

    def __init__(self) -> None:
        self._queue: asyncio.Queue[Event | PrefixCacheError] = asyncio.Queue()
        self._taken: deque[Event | PrefixCacheError] = deque()

    def put(self, event: Event | PrefixCacheError) -> None:
        """Add an event; an error is raised at the reader."""
        self._queue.put_nowait(event)

    async def get(self) -> Event:
        """The next event, or its error raised."""
        event = self._taken.popleft() if self._taken else self._joined(await self._queue.get())
        if isinstance(event, PrefixCacheError):
            try:
                raise event
            finally:
                del event  # its traceback knows this frame: together they would wait for a full collection
        return event

    def _joined(self, first: Event | PrefixCacheError) -> Event | PrefixCacheError:
        if isinstance(first, TokensGenerated):
            parts = self._take_all(first)
            samples = dict.fromkeys(part.sample for part in parts)
            self._taken.extendleft(
                reversed([_join([part for part in parts if part.sample == sample]) for sample in samples])
            )
            return self._taken.popleft()
        if isinstance(first, Progress):
            return self._take_all(first)[-1]
        return first

    def _take_all(self, first: _Event) -> list[_Event]:
        """``first`` and the events of its kind that follow it; the one after them is kept for later."""
        parts = [first]
        while not self._queue.empty():
            event = self._queue.get_nowait()
            if not isinstance(event, type(first)):
                self._taken.append(event)
                break
            parts.append(event)
        return parts


def _join(parts: list[TokensGenerated]) -> TokensGenerated:
    if len(parts) == 1:
        return parts[0]
    return replace(
        parts[-1],
        token_ids=[token_id for part in parts for token_id in part.token_ids],
        text="".join(part.text for part in parts),
        logprobs=[logprob for part in parts for logprob in part.logprobs],
    )


class Sequence:
    """State of one sample of a request; ``run`` is the canonical prefill of its prompt and owns slot and lease.

    ``samples`` are all of the request until the last of them ends, this one at place ``number``; with one mailbox.
    ``parked`` is its KV while it has no slot, given up in phase ``parked_in``.
    """

    __slots__ = (
        "admitted_at",
        "arrived_at",
        "fetch",
        "first_token_at",
        "is_abandoned",
        "mailbox",
        "max_new_tokens",
        "number",
        "output_ids",
        "output_text",
        "parked",
        "parked_in",
        "phase",
        "prefill_started_at",
        "record",
        "request",
        "run",
        "sampler",
        "samples",
        "stop_ids",
    )

    def __init__(self, request: GenerateRequest, run: CanonicalRun, *, arrived_at: float) -> None:
        self.request = request
        self.run = run
        self.arrived_at = arrived_at
        self.admitted_at: float | None = None
        self.phase = Phase.WAITING
        self.record = RequestRecord(request.request_id, prompt_tokens=len(request.prompt_token_ids))
        self.mailbox = Mailbox()
        self.samples = [self]
        self.number = 0
        self.is_abandoned = False
        self.parked: ParkedKv | None = None
        self.parked_in = Phase.WAITING
        self.fetch: asyncio.Task[None] | None = None
        self.output_ids: list[int] = []
        self.prefill_started_at = 0.0
        self.first_token_at = 0.0
        self.max_new_tokens = 0
        self.stop_ids: frozenset[int] = frozenset()
        self.sampler: Sampler
        self.output_text: OutputText

    def is_late(self, now: float) -> bool:
        """Whether its caller's deadline has passed, or will in a moment: the caller's own timer may run ahead."""
        timeout_s = self.request.timeout_s
        return timeout_s is not None and now >= self.arrived_at + timeout_s - DEADLINE_SLACK_S

    def join(self, samples: list["Sequence"]) -> None:
        """Become one more of the ``samples`` of a request."""
        self.number = len(samples)
        self.samples, self.mailbox = samples, samples[0].mailbox
        samples.append(self)

    def deliver(self, token: int, text: str, *, finish_reason: str) -> None:
        """Put a token and its certain text into the mailbox; ``finish_reason`` with the last."""
        matched_stop = self.output_text.matched_stop or ""
        logprobs = self.sampler.take_logprobs()
        self.mailbox.put(TokensGenerated([token], text, logprobs, self.number, finish_reason, matched_stop))

    @property
    def can_be_parked(self) -> bool:
        """Whether it could give its slot up now and go on later: nothing is fetched into its blocks.

        Of several samples none is parked before it has begun: the first must, to tell the reader of all.
        """
        if self.phase is Phase.READY and len(self.samples) > 1:
            return False
        return self.phase in (Phase.READY, Phase.PREFILL, Phase.DECODE) and not self.is_abandoned

    @property
    def num_kv_tokens(self) -> int:
        """Tokens from the first on whose KV is in its slot."""
        return self.next_position if self.output_ids else self.run.num_computed

    @property
    def is_request_ended(self) -> bool:
        """Whether no sample of the request waits or runs."""
        return all(sequence.phase is Phase.ENDED for sequence in self.samples)

    @property
    def next_position(self) -> int:
        """Where the last generated token, whose KV is not computed yet, stands."""
        return len(self.run.token_ids) + len(self.output_ids) - 1
