"""Chooses the next token of one sequence from its logits.

One sampler, with a generator of its own, per request: what others draw cannot
change what this one draws. Used on the model thread alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from model_worker.engine.request import SamplingParams, TokenLogprobs


@dataclass(frozen=True, slots=True)
class SamplerContext:
    """What of a request a sampler looks at besides its parameters.

    No token of ``end_ids`` is chosen before there are ``min_new_tokens``.
    """

    prompt_token_ids: Sequence[int] = ()
    max_new_tokens: int = 0
    min_new_tokens: int = 0
    end_ids: frozenset[int] = frozenset()


NO_CONTEXT = SamplerContext()


class Sampler:
    """Greedy or drawn, in transformers' order and with its processors.

    Bias, penalties and the least length change the logits; then, unless greedy,
    temperature, top-k, top-p and min-p, and a token is drawn. Greedy with none of
    the former is an argmax and keeps no history.
    """

    def __init__(self, params: SamplingParams, context: SamplerContext = NO_CONTEXT) -> None:
        self._is_greedy = params.temperature == 0.0
        self._num_logprobs = params.logprobs
        self._logprobs: list[TokenLogprobs] = []
        self._processors = _processors(params, context)
        self._history = _History(context) if _needs_history(params, context) else None
        if self._is_greedy:
            return
        self._generator = torch.Generator()
        if params.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(params.seed)
        self._processors += _warpers(params)

    def sample(self, logits: Tensor) -> int:
        """The next token for ``logits`` ``[vocab_size]``."""
        token = self._next_token(logits)
        if self._num_logprobs is not None:
            self._logprobs.append(token_logprobs(logits, token, num_top=self._num_logprobs))
        return token

    def take_logprobs(self) -> list[TokenLogprobs]:
        """Log-probabilities of the tokens sampled since the last call, where asked for; not during ``sample``."""
        taken, self._logprobs = self._logprobs, []
        return taken

    def _next_token(self, logits: Tensor) -> int:
        if self._is_greedy and not self._processors:
            return int(logits.argmax())
        row = logits.to(device="cpu", dtype=torch.float32).unsqueeze(0)
        seen = torch.empty(1, 0, dtype=torch.long) if self._history is None else self._history.ids
        scores = self._processors(cast("torch.LongTensor", seen), cast("torch.FloatTensor", row))
        token = self._choose(scores)
        if self._history is not None:
            self._history.append(token)
        return token

    def _choose(self, scores: Tensor) -> int:
        if self._is_greedy:
            return int(scores.argmax())
        return int(torch.multinomial(torch.softmax(scores, dim=-1), 1, generator=self._generator))


def token_logprobs(logits: Tensor, token: int, *, num_top: int) -> TokenLogprobs:
    """Log-probabilities in float32 of ``token`` and the ``num_top`` best under ``logits`` ``[vocab_size]``."""
    logprobs = torch.log_softmax(logits.to(device="cpu", dtype=torch.float32), dim=-1)
    values, ids = logprobs.topk(min(num_top, len(logprobs)))
    return TokenLogprobs(float(logprobs[token]), tuple(zip(ids.tolist(), values.tolist(), strict=True)))


class OutputPenalty(LogitsProcessor):
    """Presence and frequency penalty, as the OpenAI API defines them; transformers has neither.

    From the logit of a token that stands c > 0 times after the first ``num_prompt``
    ids it subtracts ``presence + c * frequency``.
    """

    def __init__(self, *, presence: float, frequency: float, num_prompt: int) -> None:
        self._presence = presence
        self._frequency = frequency
        self._num_prompt = num_prompt

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """Give new scores ``[1, vocab_size]`` for ``input_ids`` ``[1, length]``."""
        ids, counts = input_ids[0, self._num_prompt :].unique(return_counts=True)
        penalized = scores.clone()
        penalized[0, ids] -= self._presence + self._frequency * counts
        return cast("torch.FloatTensor", penalized)


class _History:
    """Ids of prompt and output so far; its tensor is made by the first look, on the model thread."""

    def __init__(self, context: SamplerContext) -> None:
        self._context = context
        self._num_tokens = len(context.prompt_token_ids)
        self._room: Tensor | None = None

    @property
    def ids(self) -> Tensor:
        """``[1, length]``."""
        if self._room is None:
            prompt = torch.tensor([self._context.prompt_token_ids], dtype=torch.long)
            self._room = torch.cat([prompt, torch.zeros(1, self._context.max_new_tokens, dtype=torch.long)], dim=1)
        return self._room[:, : self._num_tokens]

    def append(self, token: int) -> None:
        assert self._room is not None
        self._room[0, self._num_tokens] = token
        self._num_tokens += 1


def _needs_history(params: SamplingParams, context: SamplerContext) -> bool:
    is_penalized = params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty
    return bool(is_penalized or context.min_new_tokens)


def _processors(params: SamplingParams, context: SamplerContext) -> LogitsProcessorList:
    num_prompt = len(context.prompt_token_ids)
    processors = LogitsProcessorList()
    if params.logit_bias:
        biases: Any = {(token,): bias for token, bias in params.logit_bias}  # as a list, old versions refuse token 0
        processors.append(SequenceBiasLogitsProcessor(biases))
    if params.repetition_penalty != 1.0:
        processors.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.presence_penalty or params.frequency_penalty:
        penalty = OutputPenalty(
            presence=params.presence_penalty, frequency=params.frequency_penalty, num_prompt=num_prompt
        )
        processors.append(penalty)
    if context.min_new_tokens and context.end_ids:
        end_ids = sorted(context.end_ids)
        processors.append(MinNewTokensLengthLogitsProcessor(num_prompt, context.min_new_tokens, end_ids))
    return processors


def _warpers(params: SamplingParams) -> LogitsProcessorList:
    warpers = LogitsProcessorList()
    if params.temperature != 1.0:
        warpers.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        warpers.append(MinPLogitsWarper(params.min_p))
    return warpers
