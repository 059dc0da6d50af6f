"""The options of one generation: what a caller may write, and the frozen value made of it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypedDict

from prefixcache.client.types import Progress, Tool
from prefixcache.errors import InvalidRequest


class GenerateOptions(TypedDict, total=False):
    """Keyword options of ``generate``, ``stream`` and ``chat``; all may be left out.

    The defaults mean greedy decoding up to the worker's own token limit.
    ``temperature`` 0 is greedy; ``top_k`` 0, ``top_p`` 1.0 and ``min_p`` 0 keep
    all tokens; equal ``seed`` and equal request give equal tokens.
    ``repetition_penalty`` looks at prompt and output, ``presence_penalty`` and
    ``frequency_penalty`` at the output; ``logit_bias`` maps token ids to what is
    added to their logits. ``logprobs`` n asks for the log-probability of each
    token and of the n best ones, 0 to 20. Before ``min_new_tokens`` no end or stop token is
    chosen. ``stop`` is one text or several. ``tools`` go to the chat template.
    ``n`` samples, 1 to 64, are answers to one prompt that is computed once, each with
    a generator of its own. Prefixes are shared only between requests of one ``cache_salt``.
    ``bypass_prefix_cache`` neither takes nor keeps cached prefixes. ``on_progress``
    is called as the prompt is computed, at most once a block, on the client's
    event loop: it must return soon. ``priority``, -100 to 100: higher goes first; a waiting
    request gains a level every ten seconds. ``timeout`` is in seconds for the whole call, retries included.
    """

    max_new_tokens: int | None
    min_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    logprobs: int | None
    seed: int | None
    n: int
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    tools: Sequence[Tool]
    cache_salt: str
    bypass_prefix_cache: bool
    priority: int
    on_progress: Callable[[Progress], object] | None
    model: str
    timeout: float | None
    request_id: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateSettings:
    """``GenerateOptions`` with every default filled in; an unknown name is a TypeError."""

    max_new_tokens: int | None = None
    min_new_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    seed: int | None = None
    n: int = 1
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    tools: Sequence[Tool] = ()
    cache_salt: str = ""
    bypass_prefix_cache: bool = False
    priority: int = 0
    on_progress: Callable[[Progress], object] | None = None
    model: str = ""
    timeout: float | None = None
    request_id: str | None = None

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """The stop texts as a tuple, also where one was given as a plain string."""
        if isinstance(self.stop, str):
            return (self.stop,)
        if not isinstance(self.stop, Iterable):
            raise InvalidRequest(f"stop is {self.stop!r:.200}; give a text or a list of texts")
        return tuple(self.stop)


def settings_of(options: GenerateOptions) -> GenerateSettings:
    """Fill in the defaults; an unknown name is a TypeError that says which there are."""
    unknown = options.keys() - GenerateOptions.__annotations__.keys()
    if unknown:
        raise TypeError(f"{min(unknown)!r} is no option; there are {', '.join(GenerateOptions.__annotations__)}")
    return GenerateSettings(**options)
