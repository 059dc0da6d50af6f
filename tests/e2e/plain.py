"""The demo model in plain transformers, with its own attention and cache: what the engine is compared with."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from model_worker.models.catalog import resolve
from model_worker.models.loading import DTYPES, model_folder
from tests.e2e.lab import DEMO_MODEL, Answer


@dataclass(frozen=True)
class PlainAnswer:
    """Tokens of a greedy ``generate`` and the logits ``[num_tokens, vocab_size]`` they were drawn from."""

    token_ids: list[int]
    logits: Tensor


@dataclass(frozen=True)
class Divergence:
    """Where two greedy answers part: the place, plain transformers' gap between its two best logits there, and the
    largest difference between the two runs' logits."""

    place: int
    gap: float
    difference: float


class PlainModel:
    """The demo model as plain transformers runs it."""

    def __init__(self, dtype: str) -> None:
        folder: Path = model_folder(resolve(DEMO_MODEL), dtype)
        self._model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=DTYPES[dtype], attn_implementation="sdpa", local_files_only=True
        ).eval()

    @torch.inference_mode()
    def answer(self, prompt: list[int], *, num_tokens: int) -> PlainAnswer:
        """Generate greedily, at most ``num_tokens`` tokens, an end token included."""
        ids = torch.tensor([prompt])
        output = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
        return PlainAnswer(output.sequences[0, len(prompt) :].tolist(), torch.cat(output.logits))


def divergence(ours: Answer, plain: PlainAnswer) -> Divergence | None:
    """Where the answers part, if they do. Up to there both runs had the same tokens before them."""
    pairs = zip(ours.token_ids, plain.token_ids, strict=False)
    place = next((place for place, (left, right) in enumerate(pairs) if left != right), None)
    if place is None:
        assert len(ours.token_ids) == len(plain.token_ids)
        return None
    logits = plain.logits[place].float()
    best = logits.topk(2).values
    difference = (ours.logits[place].float() - logits).abs().max()
    return Divergence(place, float(best[0] - best[1]), float(difference))
