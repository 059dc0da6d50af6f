"""The row probe finds who sees a neighbour; the canary is equal where computing is equal."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from model_worker.models import row_probe
from model_worker.models.canary import canary_digest, tensors_digest
from model_worker.models.catalog import resolve
from model_worker.models.linear import pack_linears
from model_worker.models.loading import LoadedModel, LoadOptions, load
from model_worker.models.row_probe import (
    distinct_projections,
    invariant_row_counts,
    padded_rows,
    probe_rows,
)
from model_worker.models.trial import walk_tokens
from prefixcache.errors import ConfigError
from tests.fakes.tiny_model import write_tiny_model

INPUTS = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
CPU = torch.device("cpu")


def test_a_function_of_single_rows_is_invariant_at_every_count() -> None:
    assert invariant_row_counts(lambda rows: rows * 2 + 1, INPUTS) == set(range(1, 9))


def test_a_function_that_depends_on_the_number_of_rows_is_found() -> None:
    def differs_below_four(rows: Tensor) -> Tensor:
        return rows + 1e-7 if rows.shape[0] < 4 else rows.clone()

    assert invariant_row_counts(differs_below_four, INPUTS) == {4, 5, 6, 7, 8}


def test_a_function_that_sees_other_rows_is_invariant_at_no_other_count() -> None:
    assert invariant_row_counts(lambda rows: rows + rows.sum(0), INPUTS) == {8}


def test_a_function_that_sees_its_place_is_found() -> None:
    def adds_its_place(rows: Tensor) -> Tensor:
        return rows + torch.arange(rows.shape[0]).unsqueeze(1)

    assert invariant_row_counts(adds_its_place, INPUTS) == {8}


def test_counts_whose_last_group_is_small_do_not_decide_for_the_others() -> None:
    def sums_small_groups_otherwise(rows: Tensor) -> Tensor:
        num_rest = rows.shape[0] % 3
        whole = rows[: rows.shape[0] - num_rest]
        return torch.cat((whole, rows[rows.shape[0] - num_rest :] + 1e-5))

    assert invariant_row_counts(sums_small_groups_otherwise, INPUTS) == {3, 6}


@given(st.sets(st.integers(1, 64), min_size=1), st.data())
def test_padding_chooses_the_next_allowed_size(allowed: set[int], data: st.DataObject) -> None:
    num_rows = data.draw(st.integers(1, max(allowed)))
    padded = padded_rows(num_rows, tuple(sorted(allowed)))
    assert padded in allowed
    assert padded >= num_rows
    assert not any(num_rows <= size < padded for size in allowed)


def two_linears() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 24))


def test_one_linear_of_each_size_is_probed() -> None:
    model = two_linears()
    pack_linears(model)
    found = distinct_projections(model)
    assert [projection.apply(torch.ones(1, projection.in_features)).shape[1] for projection in found] == [16, 24]


def test_plain_linears_are_probed_as_packed_ones_are() -> None:
    model = two_linears()
    allowed = probe_rows(model, max_rows=3)
    layer: Any = model.get_submodule("0")
    inputs = torch.randn(8, 16)
    with torch.inference_mode():
        assert all(torch.equal(layer(inputs[:count]), layer(inputs)[:count]) for count in allowed)


def test_the_probe_keeps_what_every_linear_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([{2, 4, 6, 8}, {1, 4, 8}])
    monkeypatch.setattr(row_probe, "invariant_row_counts", lambda layer, inputs: next(answers))
    model = two_linears()
    pack_linears(model)
    assert probe_rows(model, max_rows=4) == (4, 8)


@pytest.mark.parametrize("counts", [set(), {1, 2, 3}])
def test_a_machine_on_which_no_size_serves_is_refused(counts: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_probe, "invariant_row_counts", lambda layer, inputs: set(counts))
    model = two_linears()
    pack_linears(model)
    with pytest.raises(ConfigError, match="row probe: no batch size of 4 to 8 rows"):
        probe_rows(model, max_rows=4)


def test_the_canarys_prompt_is_fixed_and_in_the_vocabulary() -> None:
    tokens = walk_tokens(192, 264)
    assert tokens == walk_tokens(192, 264)
    assert tokens[:3] == [141, 140, 139]
    assert len(set(tokens)) > 100
    assert all(0 <= token < 264 for token in tokens)


def test_a_digest_sees_every_bit_and_the_order() -> None:
    one, zero, minus_zero = torch.ones(2), torch.zeros(2), torch.tensor([0.0, -0.0])
    digests = [tensors_digest(tensors) for tensors in ([one, zero], [zero, one], [one, minus_zero])]
    assert len(set(digests)) == 3
    assert tensors_digest([one.bfloat16()]) != tensors_digest([one])
    assert tensors_digest([torch.ones(4, 2).t()]) == tensors_digest([torch.ones(8)])


@pytest.fixture(scope="module")
def load_tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., LoadedModel]:
    def load_with(*, dtype: str = "float32", block_size: int = 8, seed: int = 0) -> LoadedModel:
        folder = write_tiny_model(Path(tmp_path_factory.mktemp("model")), seed=seed)
        return load(resolve(str(folder)), LoadOptions(dtype, CPU, block_size))

    return load_with


def test_equal_models_have_equal_canaries_and_others_others(load_tiny: Callable[..., LoadedModel]) -> None:
    base = canary_digest(load_tiny())
    assert canary_digest(load_tiny()) == base
    others = [
        canary_digest(load_tiny(seed=1)),
        canary_digest(load_tiny(dtype="bfloat16")),
        canary_digest(load_tiny(block_size=16)),
    ]
    assert len({base, *others}) == 4


def test_a_canary_is_the_same_again_after_other_work(load_tiny: Callable[..., LoadedModel]) -> None:
    model = load_tiny()
    first = canary_digest(model)
    probe_rows(model.causal.model, max_rows=4)
    assert canary_digest(model) == first
