"""What the RPC layer needs of the engine, and nothing else of it.

The servicers are written against these protocols; the engine fits them, and so
does the fake engine of the tests.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Protocol, TypeVar, TypeVarTuple

from model_worker.engine.diagnosis import Diagnosis
from model_worker.engine.request import Event, GenerateRequest
from model_worker.engine.statistics import (
    ClearResult,
    EvictResult,
    LookupResult,
    PrefixPage,
    TierReport,
    WarmResult,
    WorkerStats,
)

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")


class ModelDescription(Protocol):
    """The model served: what validation reads, besides all fields of ``GetModelInfoResponse``."""

    @property
    def model(self) -> str:
        """Name the model is served under."""

    @property
    def namespace_digest(self) -> str:
        """Digest of the identity of the worker's KV, in hex."""

    @property
    def namespace_fields(self) -> Mapping[str, str]:
        """What that identity is made of."""

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and output together."""

    @property
    def vocab_size(self) -> int:
        """Token ids are in [0, vocab_size)."""


class Tokenizer(Protocol):
    """The model's tokenizer and chat template; thread-safe; raises InvalidRequest."""

    @property
    def has_chat_template(self) -> bool:
        """Whether ``render_chat`` can work at all."""

    def fewest_tokens(self, text: str, /) -> int:
        """A number of tokens that ``text`` has at least, found quickly; 0 where nothing is known."""

    def encode_text(self, text: str, /) -> list[int]:
        """Tokenize plain text, with the special tokens the tokenizer adds by default."""

    @property
    def takes_tools(self) -> bool:
        """Whether the chat template does anything with tools."""

    def render_chat(self, messages: list[dict[str, str]], tools: list[dict[str, object]], /) -> str:
        """Render messages of ``role`` and ``content``, and JSON objects of tools, by the chat template."""

    def encode_rendered(self, text: str, /) -> list[int]:
        """Tokenize a rendered chat, whose special tokens are in its text."""

    def decode(self, ids: list[int], /) -> str:
        """Return the text of token ids, special tokens included."""


class Backend(Protocol):
    """The engine as the servicers see it; every method is called on its event loop."""

    @property
    def description(self) -> ModelDescription:
        """The model served."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""

    def generate(self, request: GenerateRequest, /) -> AsyncGenerator[Event, None]:
        """Run one request: Started, Progress*, TokensGenerated*, Finished; closing the generator aborts it."""

    def abort(self, request_id: str, /) -> None:
        """End a request that waits or runs; raises NotFound where there is none of this id."""

    def lookup(self, prompt_token_ids: list[int], /, *, cache_salt: str) -> LookupResult:
        """Say what of a prompt is in memory, changing nothing."""

    def lookup_tiers(
        self, prompt_token_ids: list[int], /, *, cache_salt: str, num_cached: int
    ) -> Awaitable[dict[str, int]]:
        """Say by tier what of a prompt, from token ``num_cached`` on, could be fetched, changing nothing."""

    def warm(
        self,
        prompt_token_ids: list[int],
        /,
        *,
        cache_salt: str,
        request_id: str,
        timeout_s: float | None,
        priority: int,
    ) -> Awaitable[WarmResult]:
        """Compute a prompt's full blocks for the cache; cancelling the caller aborts it."""

    def list_prefixes(self, *, page_size: int, page_token: str) -> PrefixPage:
        """Give a page of what is cached; raises InvalidRequest for a token that no page gave."""

    def evict(self, target_bytes: int, /) -> EvictResult:
        """Shrink the cache to at most ``target_bytes``."""

    def clear(self) -> ClearResult:
        """Drop every prefix in memory."""

    def clear_tiers(self) -> Awaitable[None]:
        """Drop what tiers hold under the scopes used here; raises TierUnavailable."""

    def stats(self) -> WorkerStats:
        """Take a snapshot of counters and gauges."""

    def tier_stats(self) -> Awaitable[list[TierReport]]:
        """Ask each tier for its own, nearest first."""

    def diagnose(self, *, measure: bool) -> Awaitable[Diagnosis]:
        """Tell what is known of model and machine, and where asked measure them; raises CapacityExceeded."""

    def run_io(self, function: Callable[[*Arguments], Result], /, *args: *Arguments) -> Awaitable[Result]:
        """Run a blocking function in the I/O pool."""

    def run_long_io(self, function: Callable[[*Arguments], Result], /, *args: *Arguments) -> Awaitable[Result]:
        """Run a blocking function that takes long, one at a time; raises CapacityExceeded where too many wait."""
