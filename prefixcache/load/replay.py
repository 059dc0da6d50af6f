"""A trace as load: token ids made up from its blocks, so that equal prefixes stay equal."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from prefixcache.load.conversation import Planned, Request, single
from prefixcache.load.token_source import TokenSource
from prefixcache.sim import Trace, TraceRequest

MAX_BLOCKS_KEPT: Final = 16_384


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """How a trace is fitted to a worker.

    Times are multiplied by ``time_scale``, lengths by ``token_scale``, blocks and
    all, so that what is shared stays shared. ``max_new_tokens`` caps the trace's own
    output lengths; prompts that with their output exceed ``max_model_len`` are left out.
    """

    max_model_len: int
    time_scale: float = 1.0
    token_scale: float = 1.0
    max_new_tokens: int | None = None


class Replay:
    """The requests of a trace in their order; ``num_skipped`` counts those left out so far as too long."""

    def __init__(self, trace: Trace, source: TokenSource, options: ReplayOptions) -> None:
        self._trace = trace
        self._source = source
        self._options = options
        self._block_tokens = max(1, round(trace.block_size * options.token_scale))
        self._block = lru_cache(MAX_BLOCKS_KEPT)(self._make_block)
        self.num_skipped = 0

    def planned(self) -> Iterator[Planned]:
        """Each request at its time; its prompt is made when it is taken."""
        for number, request in enumerate(self._trace.requests):
            num_new = self._num_new_tokens(request)
            num_prompt = self._num_prompt_tokens(request)
            if num_prompt + num_new > self._options.max_model_len:
                self.num_skipped += 1
                continue
            prompt = self._prompt(number, request, num_prompt)
            yield Planned(request.arrival_s * self._options.time_scale, single(Request(prompt, num_new)))

    def _num_new_tokens(self, request: TraceRequest) -> int:
        wanted = max(1, round(request.output_tokens * self._options.token_scale))
        return min(wanted, self._options.max_new_tokens or wanted)

    def _num_prompt_tokens(self, request: TraceRequest) -> int:
        full, rest = divmod(request.input_tokens, self._trace.block_size)
        return max(1, full * self._block_tokens + min(round(rest * self._options.token_scale), self._block_tokens))

    def _prompt(self, number: int, request: TraceRequest, num_tokens: int) -> tuple[int, ...]:
        tokens: list[int] = []
        for key in request.block_keys:
            tokens += self._block(key)
        missing = num_tokens - len(tokens)
        if missing > 0:
            tokens += self._source.run(f"rest of request {number}", missing)
        return tuple(tokens[:num_tokens])

    def _make_block(self, key: int) -> tuple[int, ...]:
        return self._source.run(f"block {key}", self._block_tokens)
