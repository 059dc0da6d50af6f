"""Chooses the next token of one sequence from its logits.

One sampler, with a generator of its own, per request: what others draw cannot
change what this one draws. Used on the model thread alone.
"""

from typing import cast

import torch
from torch import Tensor
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from model_worker.engine.request import SamplingParams


class Sampler:
    """Greedy, or temperature, then top-k, then top-p, in transformers' order and with its processors."""

    def __init__(self, params: SamplingParams) -> None:
        self._is_greedy = params.temperature == 0.0
        if self._is_greedy:
            return
        self._generator = torch.Generator()
        if params.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(params.seed)
        warpers = LogitsProcessorList()
        if params.temperature != 1.0:
            warpers.append(TemperatureLogitsWarper(params.temperature))
        if params.top_k:
            warpers.append(TopKLogitsWarper(params.top_k))
        if params.top_p < 1.0:
            warpers.append(TopPLogitsWarper(params.top_p))
        self._warpers = warpers

    def sample(self, logits: Tensor) -> int:
        """The next token for ``logits`` ``[vocab_size]``."""
        if self._is_greedy:
            return int(logits.argmax())
        row = logits.to(device="cpu", dtype=torch.float32).unsqueeze(0)
        warped = self._warpers(cast("torch.LongTensor", torch.empty(1, 0, dtype=torch.long)), row)
        return int(torch.multinomial(torch.softmax(warped, dim=-1), 1, generator=self._generator))
