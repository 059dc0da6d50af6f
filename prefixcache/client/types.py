"""What the client takes and gives: plain frozen values, no protobuf, no gRPC.

Counts are tokens, blocks or bytes as named; times ending in ``_s`` are seconds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypedDict

FinishReason = Literal["eos", "stop_text", "stop_token", "length", "unspecified"]
"""Why a generation ended: an end token of the model, a stop text or stop token of the request, the token limit."""


class Message(TypedDict):
    """One turn of a conversation; ``role`` is what the model's template accepts, such as ``user``."""

    role: str
    content: str


Messages = Sequence[Message] | Sequence[Mapping[str, str]]
"""A conversation in order; each turn has exactly ``role`` and ``content``."""

Tool = Mapping[str, object]
"""A tool the model may call, in the form its template expects; written as JSON."""

Prompt = str | Sequence[int] | Messages
"""Plain text, token ids used as they are, or a conversation for the model's chat template."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request.

    ``cached_prompt_tokens`` came from the cache, by where they were found in
    ``cached_prompt_tokens_by_tier`` ("l1", "disk", "redis"); ``cache_creation_tokens``
    were put into it by the request's end.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_prompt_tokens: int
    cache_creation_tokens: int
    cached_prompt_tokens_by_tier: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Timings:
    """Where the time of one request went, measured by the worker, in seconds.

    Of several samples these are the first one's, but for ``prefill_s``, their sum, and
    ``total_s``, which ends with the last.

    ``ttft_s`` and ``total_s`` count from the request's arrival at the engine,
    ``tpot_s`` is the mean per output token after the first, ``saved_s`` estimates
    the prefill that cached tokens made unnecessary, ``fetch_s`` went into looking for
    blocks in the tiers below memory and reading them.
    """

    queue_s: float
    lookup_s: float
    load_s: float
    prefill_s: float
    ttft_s: float
    tpot_s: float
    total_s: float
    saved_s: float
    fetch_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Started:
    """The request was admitted and matched against the cache; the last by tier, as in ``Usage``."""

    prompt_tokens: int
    cached_prompt_tokens: int
    cached_prompt_tokens_by_tier: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the prompt is computed; ``processed_prompt_tokens`` counts cached ones too."""

    processed_prompt_tokens: int
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities, to base e, at the place of one generated token: its own, and of the best tokens.

    ``top`` has (token id, logprob) pairs, best first. They are the model's own,
    before any bias, penalty or temperature.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of the answer; either part may be empty, never both for long.

    ``text`` never ends inside a character and never holds the beginning of what
    may become a stop text. ``logprobs`` has one for each token id, if asked for.
    ``sample`` is the place of the sample it belongs to; pieces of several come
    interleaved. ``finish_reason`` is set in a sample's last piece, and
    ``matched_stop`` where a stop text ended it.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    sample: int = 0
    finish_reason: FinishReason | None = None
    matched_stop: str = ""


@dataclass(frozen=True, slots=True)
class Sample:
    """One of the answers to a prompt; its fields are those of ``Generation``."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    matched_stop: str
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Generation:
    """A finished answer. ``matched_stop`` is the stop text that ended it, or empty.

    ``logprobs`` has one for each token id, if asked for. ``samples`` has all ``n``
    answers in order; the fields beside it are the first one's, but for ``usage``,
    which counts the prompt once and the tokens of all answers, and ``timings``.
    """

    text: str
    token_ids: tuple[int, ...]
    usage: Usage
    timings: Timings
    finish_reason: FinishReason
    matched_stop: str
    request_id: str
    logprobs: tuple[TokenLogprobs, ...] = ()
    samples: tuple[Sample, ...] = ()


@dataclass(frozen=True, slots=True)
class Tokenized:
    """Token ids a prompt is computed as, and the text they come from (a chat's rendered template)."""

    token_ids: tuple[int, ...]
    text: str


@dataclass(frozen=True, slots=True)
class Lookup:
    """What is cached of a prompt now, in the worker's memory.

    ``cached_blocks`` may be one more than ``cached_prompt_tokens`` tells, since
    the last token of a prompt is always computed. ``available_tokens_by_tier`` has
    those tokens as "l1", and what follows them in the tiers below.
    """

    prompt_tokens: int
    cached_prompt_tokens: int
    cached_blocks: int
    num_blocks: int
    block_size: int
    available_tokens_by_tier: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Warmed:
    """What warming found and did; ``cached_blocks`` are those in the cache now."""

    prompt_tokens: int
    cached_prompt_tokens: int
    computed_prompt_tokens: int
    cached_blocks: int
    num_blocks: int
    block_size: int


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The model a worker serves, its limits and its cache identity.

    ``numerics`` is "strict", where hits have the bits of misses, or "fast", where they differ by rounding.
    """

    model: str
    model_type: str
    max_model_len: int
    vocab_size: int
    block_size: int
    block_bytes: int
    dtype: str
    device: str
    namespace_digest: str
    namespace_fields: Mapping[str, str]
    version: str
    has_chat_template: bool
    eos_token_ids: tuple[int, ...]
    max_num_seqs: int
    is_cache_enabled: bool
    memory_plan_bytes: Mapping[str, int]
    numerics: str = ""
    num_threads: int = 0


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """A prefix at whose end cached prompts part or end.

    ``own_bytes`` are those of its last blocks, which the next shorter one in the
    list does not have. ``hits`` counts how often it, or one that begins with it,
    was taken from the cache. Nothing longer begins with one that ``is_leaf``.
    """

    num_tokens: int
    own_bytes: int
    hits: int
    is_held: bool
    is_leaf: bool


@dataclass(frozen=True, slots=True)
class PrefixPage:
    """Cached prefixes, most recently used first; ``next_page_token`` is empty after the last page."""

    prefixes: tuple[CachedPrefix, ...]
    next_page_token: str


@dataclass(frozen=True, slots=True)
class Evicted:
    """What an eviction removed, and the bytes still held (above the target where blocks are in use)."""

    evicted_blocks: int
    evicted_bytes: int
    used_bytes: int


@dataclass(frozen=True, slots=True)
class Cleared:
    """What a clear made unmatchable."""

    cleared_blocks: int
    cleared_bytes: int
