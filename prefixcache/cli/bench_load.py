"""From the options of ``bench`` to the load they describe, made anew for each target."""

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from prefixcache.errors import ConfigError
from prefixcache.load.arrivals import poisson_arrivals
from prefixcache.load.conversation import Planned, planned_now
from prefixcache.load.dataset import Dataset
from prefixcache.load.measure import Plan
from prefixcache.load.prompt_file import each_once, read_prompts
from prefixcache.load.replay import Replay, ReplayOptions
from prefixcache.load.runner import Limits
from prefixcache.load.synthetic import ChatShape, SharedPrefix, chat_load, shared_prefix_load
from prefixcache.load.token_source import TokenSource
from prefixcache.sim import TraceOptions, read_trace

if TYPE_CHECKING:
    from prefixcache.client import ModelInfo

DEFAULT_CONCURRENCY: Final = 8
DEFAULT_NUM_REQUESTS: Final = 100
DEFAULT_NEW_TOKENS: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSettings:
    """What was asked for; None: see ``LoadBuilder``."""

    dataset: Dataset
    file: Path | None
    shared_prefix: SharedPrefix
    chat: ChatShape
    trace: TraceOptions
    time_scale: float
    token_scale: float
    concurrency: int | None
    rate: float | None
    num_requests: int | None
    duration_s: float | None
    num_warmup: int
    max_new_tokens: int | None
    seed: int


@dataclass(frozen=True, slots=True)
class Load:
    """Conversations with their times, and how many requests were left out as too long so far."""

    planned: Iterator[Planned]
    num_skipped: Callable[[], int]


class LoadBuilder:
    """Makes the load again and again, each time the same.

    A trace keeps its own times unless a concurrency or a rate is given; everything
    else is a closed loop unless a rate is. Without a limit a file is sent once and
    made-up load ends after 100 requests; with one, a file of prompts starts again.
    """

    def __init__(self, settings: LoadSettings, model: "ModelInfo") -> None:
        self._settings = settings
        self._model = model
        self._source = TokenSource(model.vocab_size, seed=settings.seed, excluded=model.eos_token_ids)
        self._new_tokens = settings.max_new_tokens or DEFAULT_NEW_TOKENS
        self._make = self._choose()

    def plan(self) -> Plan:
        """How the load is sent."""
        settings = self._settings
        has_times = settings.rate is not None or (self._is_trace and settings.concurrency is None)
        is_endless = settings.dataset in (Dataset.SHARED_PREFIX, Dataset.CHAT)
        is_limited = settings.num_requests is not None or settings.duration_s is not None
        return Plan(
            Limits(
                DEFAULT_NUM_REQUESTS if is_endless and not is_limited else settings.num_requests, settings.duration_s
            ),
            concurrency=None if has_times else settings.concurrency or DEFAULT_CONCURRENCY,
            num_warmup=settings.num_warmup,
        )

    def build(self) -> Load:
        """The load from its start."""
        load, settings = self._make(), self._settings
        if settings.rate is None:
            return load
        rng = random.Random(settings.seed)  # noqa: S311  repeatable arrivals, no secret
        return Load(poisson_arrivals(load.planned, rate=settings.rate, rng=rng), load.num_skipped)

    @property
    def _is_trace(self) -> bool:
        return self._settings.dataset is Dataset.TRACE

    def _choose(self) -> Callable[[], Load]:
        settings = self._settings
        match settings.dataset:
            case Dataset.SHARED_PREFIX:
                shape, limit = settings.shared_prefix, self._new_tokens
                return lambda: _load(planned_now(shared_prefix_load(shape, self._source, max_new_tokens=limit)))
            case Dataset.CHAT:
                chat, limit = settings.chat, self._new_tokens
                return lambda: _load(planned_now(chat_load(chat, self._source, max_new_tokens=limit)))
            case Dataset.PROMPTS:
                return self._from_prompts()
            case Dataset.TRACE:
                return self._from_trace()

    def _from_prompts(self) -> Callable[[], Load]:
        makers = read_prompts(self._file(), max_new_tokens=self._new_tokens)
        limits = self.plan().limits
        if limits.num_requests is None and limits.duration_s is None:
            return lambda: _load(planned_now(each_once(makers)))
        return lambda: _load(planned_now(make() for make in itertools.cycle(makers)))

    def _from_trace(self) -> Callable[[], Load]:
        trace, settings = read_trace(self._file(), self._settings.trace), self._settings
        options = ReplayOptions(
            self._model.max_model_len, settings.time_scale, settings.token_scale, settings.max_new_tokens
        )

        def make() -> Load:
            replay = Replay(trace, self._source, options)
            return Load(replay.planned(), lambda: replay.num_skipped)

        return make

    def _file(self) -> Path:
        if self._settings.file is None:
            raise ConfigError(f"dataset {self._settings.dataset} is read from a file; give it with --file")
        return self._settings.file


def _load(planned: Iterator[Planned]) -> Load:
    return Load(planned, lambda: 0)
