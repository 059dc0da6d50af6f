"""Mixtures of experts: in a decode a row goes to its experts by itself, whoever else, or what padding, is there."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from model_worker.models.catalog import resolve
from model_worker.models.loading import LoadedModel, LoadOptions, load
from model_worker.models.row_probe import probe_rows
from model_worker.models.transformers_adapter import EXPERTS_BY_GROUP, EXPERTS_BY_ROW
from model_worker.models.trial import Row, Trial, walk_tokens
from tests.models.families import write_family

BLOCK_SIZE = 8
NUM_ROWS = 4
PADDING_TOKEN = 0

Output = tuple[Tensor, Tensor]


@pytest.fixture(params=[(family, dtype) for family in ("mixtral", "qwen3-moe") for dtype in ("float32", "bfloat16")])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> LoadedModel:
    family, dtype = request.param
    return load(resolve(str(write_family(family, tmp_path))), LoadOptions(dtype, torch.device("cpu"), BLOCK_SIZE))


def sequences(model: LoadedModel, trial: Trial) -> list[Row]:
    """Sequences of several lengths; the first goes on with the token that padding has."""
    rows = []
    for seed in range(NUM_ROWS):
        length = 1 + 5 * seed
        kv = trial.new_kv(length + 1)
        trial.prefill_blocks(kv, walk_tokens(length, model.vocab_size, start=seed))
        rows.append(Row(kv, PADDING_TOKEN + 7 * seed, length))
    return rows


def decoded(trial: Trial, rows: list[Row], *, num_padded: int) -> list[Output]:
    logits = trial.decode(rows, num_padded=num_padded)
    return [(logits[place], row.kv[:, :, :, row.position].clone()) for place, row in enumerate(rows)]


def test_neither_padding_nor_neighbours_change_a_rows_bits(model: LoadedModel) -> None:
    allowed = probe_rows(model.causal.model, max_rows=NUM_ROWS)
    trial = Trial(model.causal, model.layout)
    rows = sequences(model, trial)
    alone = [decoded(trial, [row], num_padded=allowed[0])[0] for row in rows]
    for num_padded in allowed:
        for num_rows in range(1, min(num_padded, NUM_ROWS) + 1):
            for mine, expected in zip(decoded(trial, rows[:num_rows], num_padded=num_padded), alone, strict=False):
                assert all(torch.equal(one, other) for one, other in zip(mine, expected, strict=True))


def test_the_two_ways_to_compute_experts_agree_within_rounding(model: LoadedModel) -> None:
    trial = Trial(model.causal, model.layout)
    token_ids = walk_tokens(BLOCK_SIZE + 1, model.vocab_size)
    kv = trial.new_kv(len(token_ids))
    by_group = trial.prefill(kv, token_ids)
    by_row = trial.decode([Row(kv, token_ids[-1], BLOCK_SIZE)], num_padded=1)
    assert model.causal.experts == f"{EXPERTS_BY_GROUP} {EXPERTS_BY_ROW}"
    tolerance = 1e-4 if model.dtype == "float32" else 5e-2
    assert torch.allclose(by_row, by_group, atol=tolerance * float(by_group.abs().max()))
