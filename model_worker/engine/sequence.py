"""One request while the engine works on it.

Owner: the engine's loop. The model thread sees a sequence's slot and sampler only,
inside the step it was given.
"""

import asyncio
from enum import Enum

from model_worker.engine.canonical import CanonicalRun
from model_worker.engine.output import OutputText
from model_worker.engine.request import Event, GenerateRequest, Progress, TokensGenerated
from model_worker.engine.sampler import Sampler
from prefixcache.accounting import RequestRecord
from prefixcache.errors import PrefixCacheError

DEADLINE_SLACK_S = 0.1


class Phase(Enum):
    """Where a sequence is on its path."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    ENDED = "ended"


class Mailbox:
    """Events on their way to the one reader of a request.

    Holds at most one event per prompt block and generated token; tokens that pile up at
    a slow reader are joined into one event, of progress it gets the newest.
    """

    def __init__(self) -> None:
        self._queue: asyncio.Queue[Event | PrefixCacheError] = asyncio.Queue()
        self._next: Event | PrefixCacheError | None = None

    def put(self, event: Event | PrefixCacheError) -> None:
        """Add an event; an error is raised at the reader."""
        self._queue.put_nowait(event)

    async def get(self) -> Event:
        """The next event, or its error raised."""
        event = self._next or await self._queue.get()
        self._next = None
        if isinstance(event, PrefixCacheError):
            raise event
        if isinstance(event, TokensGenerated):
            return self._join(event)
        if isinstance(event, Progress):
            return self._newest(event)
        return event

    def _join(self, first: TokensGenerated) -> TokensGenerated:
        parts = [first]
        while not self._queue.empty():
            event = self._queue.get_nowait()
            if not isinstance(event, TokensGenerated):
                self._next = event
                break
            parts.append(event)
        if len(parts) == 1:
            return first
        ids = [token_id for part in parts for token_id in part.token_ids]
        logprobs = [logprob for part in parts for logprob in part.logprobs]
        return TokensGenerated(ids, "".join(part.text for part in parts), logprobs)

    def _newest(self, progress: Progress) -> Progress:
        while not self._queue.empty():
            event = self._queue.get_nowait()
            if not isinstance(event, Progress):
                self._next = event
                break
            progress = event
        return progress


class Sequence:
    """State of one request; ``run`` is the canonical prefill of its prompt and owns slot and lease."""

    __slots__ = (
        "arrived_at",
        "first_token_at",
        "is_abandoned",
        "mailbox",
        "max_new_tokens",
        "output_ids",
        "output_text",
        "phase",
        "prefill_started_at",
        "record",
        "request",
        "run",
        "sampler",
        "stop_ids",
    )

    def __init__(self, request: GenerateRequest, run: CanonicalRun, *, arrived_at: float) -> None:
        self.request = request
        self.run = run
        self.arrived_at = arrived_at
        self.phase = Phase.WAITING
        self.record = RequestRecord(request.request_id, prompt_tokens=len(request.prompt_token_ids))
        self.mailbox = Mailbox()
        self.is_abandoned = False
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

    @property
    def next_position(self) -> int:
        """Where the last generated token, whose KV is not computed yet, stands."""
        return len(self.run.token_ids) + len(self.output_ids) - 1
