"""From a request to a sequence: limits checked, tools made; and when its output ends."""

from dataclasses import dataclass, replace

from model_worker.engine.canonical import CanonicalRun
from model_worker.engine.numerics import STRICT, NumericsPolicy
from model_worker.engine.output import OutputText
from model_worker.engine.request import GenerateRequest
from model_worker.engine.sampler import Sampler, SamplerContext
from model_worker.engine.sequence import Sequence
from model_worker.models.catalog import ModelDescription
from model_worker.models.tokenizer import PromptTokenizer
from prefixcache.core.blocks import token_bytes
from prefixcache.core.namespace import scope_root, scope_salt
from prefixcache.errors import InvalidRequest

LOCAL_TENANT = "local"


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Every bound of the engine, and what of it is switched off or, by its numerics, allowed.

    An iteration computes at most ``prefill_blocks`` blocks of prompts. ``max_reorder_wait_s``: after how
    many seconds of waiting a request is no longer passed by others with longer cached prefixes.
    ``parking_bytes`` are for the KV of sequences that gave their slots up.
    """

    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_waiting: int
    default_max_new_tokens: int
    prefill_blocks: int = 1
    max_reorder_wait_s: float = 0.0
    is_recompute_enabled: bool = True
    parking_bytes: int = 0
    numerics: NumericsPolicy = STRICT


class Admission:
    """Prepares sequences of one model and judges their tokens."""

    def __init__(
        self,
        tokenizer: PromptTokenizer,
        description: ModelDescription,
        limits: EngineLimits,
        *,
        namespace_digest: bytes,
    ) -> None:
        self._tokenizer = tokenizer
        self._eos = frozenset(description.eos_token_ids)
        self._vocab_size = description.vocab_size
        self._limits = limits
        self._namespace_digest = namespace_digest

    def scope_root(self, cache_salt: str) -> bytes:
        """Root of the chains of all requests with this salt."""
        return scope_root(self._namespace_digest, scope_salt(LOCAL_TENANT, cache_salt, secret=None))

    def check(self, request: GenerateRequest) -> None:
        """Raise InvalidRequest, with the field, its value and what to do, for what the model cannot do."""
        max_new_tokens = self._max_new_tokens(request)
        if request.stopping.min_new_tokens > max_new_tokens:
            raise InvalidRequest(
                f"min_new_tokens is {request.stopping.min_new_tokens} and at most {max_new_tokens} tokens will be "
                f"generated; ask for fewer, or raise max_new_tokens"
            )
        self._check_ids(request.prompt_token_ids)

    def prepare(self, request: GenerateRequest, *, now: float) -> Sequence:
        """A sequence ready for the queue, the first of its samples, of a request that was checked."""
        ids = request.prompt_token_ids
        if request.only_warms:
            ids = ids[: len(ids) // self._limits.block_size * self._limits.block_size]
        run = CanonicalRun(
            ids, token_bytes(ids), self.scope_root(request.cache_salt), bypasses_cache=request.bypass_prefix_cache
        )
        context = self._sampler_context(request, self._max_new_tokens(request))
        first = Sequence(request, run, arrived_at=now)
        for _ in range(1, request.sampling.num_samples):
            Sequence(request, replace(run), arrived_at=now).join(first.samples)
        for sequence in first.samples:
            self._equip(sequence, context)
        return first

    def judge(self, sequence: Sequence, token: int) -> tuple[str, str]:
        """The reason to stop after ``token``, empty to go on, and the text that is certain now."""
        output = sequence.output_text
        if token in sequence.stop_ids:
            return "stop_token", output.flush()
        if token in self._eos and not sequence.request.stopping.ignore_eos:
            return "eos", output.flush()
        text = output.push(token)
        if output.matched_stop is not None:
            return "stop_text", text
        if len(sequence.output_ids) >= sequence.max_new_tokens:
            return "length", text + output.flush()
        return "", text

    def _equip(self, sequence: Sequence, context: SamplerContext) -> None:
        stopping = sequence.request.stopping
        sequence.max_new_tokens = context.max_new_tokens
        sequence.stop_ids = frozenset(stopping.stop_token_ids)
        sequence.sampler = Sampler(sequence.request.sampling.of_sample(sequence.number), context)
        sequence.output_text = OutputText(self._tokenizer.new_stream(), stopping.stop)

    def _sampler_context(self, request: GenerateRequest, max_new_tokens: int) -> SamplerContext:
        stopping = request.stopping
        end_ids = frozenset(stopping.stop_token_ids) | (frozenset() if stopping.ignore_eos else self._eos)
        return SamplerContext(request.prompt_token_ids, max_new_tokens, stopping.min_new_tokens, end_ids)

    def _check_ids(self, token_ids: list[int]) -> None:
        if min(token_ids) < 0 or max(token_ids) >= self._vocab_size:
            place, bad = next((i, t) for i, t in enumerate(token_ids) if not 0 <= t < self._vocab_size)
            raise InvalidRequest(
                f"prompt token {place} is {bad}, outside the vocabulary [0, {self._vocab_size}); "
                f"tokenize with this worker's Tokenize"
            )

    def _max_new_tokens(self, request: GenerateRequest) -> int:
        limit = self._limits.max_model_len
        num_prompt = len(request.prompt_token_ids)
        if num_prompt == 0:
            raise InvalidRequest("the prompt has no tokens; send at least one")
        if num_prompt >= limit:
            raise InvalidRequest(
                f"the prompt has {num_prompt} tokens and max_model_len is {limit}, which leaves no room for a new "
                f"token; shorten the prompt, or give the worker a larger max_model_len if its model has the positions"
            )
        wanted = request.stopping.max_new_tokens
        if wanted is None:
            return min(self._limits.default_max_new_tokens, limit - num_prompt)
        if wanted < 1:
            raise InvalidRequest(f"max_new_tokens is {wanted}; it must be at least 1")
        if num_prompt + wanted > limit:
            raise InvalidRequest(
                f"prompt ({num_prompt} tokens) and max_new_tokens ({wanted}) together exceed max_model_len ({limit}); "
                f"ask for at most {limit - num_prompt} new tokens"
            )
        return wanted
