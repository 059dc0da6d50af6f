"""What a token costs is counted from the layers; times are the shortest of several."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from model_worker.models import measuring
from model_worker.models.catalog import resolve
from model_worker.models.costs import decode_bytes, prefill_ops
from model_worker.models.linear import packed_linears
from model_worker.models.loading import LoadedModel, LoadOptions, load
from model_worker.models.measuring import Meter, Timing, compute_dtype
from model_worker.models.row_probe import probe_rows
from tests.models.families import write_family

CPU = torch.device("cpu")
HIDDEN, INTERMEDIATE, NUM_LAYERS, NUM_HEADS, HEAD_DIM, VOCABULARY = 64, 128, 2, 4, 16, 264
NUM_KV_HEADS = 2
LAYER = 2 * HIDDEN * NUM_HEADS * HEAD_DIM + 2 * HIDDEN * NUM_KV_HEADS * HEAD_DIM + 3 * HIDDEN * INTERMEDIATE


@pytest.fixture
def model(tiny_folder: Path) -> LoadedModel:
    return load(resolve(str(tiny_folder)), LoadOptions("float32", CPU, 8))


def load_family(folder: Path, family: str) -> LoadedModel:
    return load(resolve(str(write_family(family, folder))), LoadOptions("float32", CPU, 8))


def test_prefill_is_counted_as_its_formula_says(model: LoadedModel) -> None:
    attention = 4 * NUM_LAYERS * NUM_HEADS * HEAD_DIM * 8 * 8
    assert prefill_ops(model, 8) == 2 * NUM_LAYERS * LAYER * 8 + attention


def test_decode_reads_packed_weights_the_lm_head_and_the_kv_so_far(model: LoadedModel) -> None:
    packed = sum(layer.kernel.packed_bytes for layer in packed_linears(model.causal.model))
    assert decode_bytes(model, 9) == packed + model.layout.slot_bytes(9)
    sizes = {
        layer.kernel.packed_bytes / (layer.in_features * layer.out_features)
        for layer in packed_linears(model.causal.model)
    }
    assert sizes == {4}
    assert packed == 4 * (NUM_LAYERS * LAYER + HIDDEN * VOCABULARY)


@pytest.mark.parametrize(("family", "num_experts", "width"), [("mixtral", 4, 64), ("qwen3-moe", 6, 32)])
def test_of_experts_those_are_counted_that_a_token_is_sent_to(
    tmp_path: Path, family: str, num_experts: int, width: int
) -> None:
    model = load_family(tmp_path, family)
    attention = 2 * HIDDEN * NUM_HEADS * HEAD_DIM + 2 * HIDDEN * NUM_KV_HEADS * HEAD_DIM
    met = attention + HIDDEN * num_experts + 2 * 3 * HIDDEN * width
    assert prefill_ops(model, 1) == 2 * NUM_LAYERS * met + 4 * NUM_LAYERS * NUM_HEADS * HEAD_DIM


@pytest.mark.parametrize("family", ["gpt2", "gpt-neo", "bloom", "gemma2"])
def test_every_kind_of_model_can_be_measured(tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "BUDGET_S", 0.0)
    monkeypatch.setattr(measuring, "BUFFER_BYTES", {"cpu": 1 << 20})
    model = load_family(tmp_path, family)
    meter = Meter(model, partition=None, allowed_rows=probe_rows(model.causal.model, max_rows=2), free_bytes=1 << 40)
    for piece in meter.pieces():
        piece()
    found = meter.result()
    assert found.prefill_ops > 0
    assert found.decode_s > 0


def test_a_block_as_long_as_the_model_has_positions_leaves_room_for_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "BUDGET_S", 0.0)
    folder = write_family("gpt2", tmp_path)
    model = load(resolve(str(folder)), LoadOptions("float32", CPU, 256))
    meter = Meter(model, partition=None, allowed_rows=(1, 2), free_bytes=1 << 40)
    for piece in meter.pieces():
        piece()
    assert (meter.result().prefill_tokens, meter.result().decode_context_tokens) == (256, 255)


def test_products_in_bfloat16_are_compared_with_products_in_bfloat16(model: LoadedModel) -> None:
    assert compute_dtype(model) is torch.float32
    for layer in packed_linears(model.causal.model):
        layer.kernel.dtype = torch.bfloat16
    assert compute_dtype(model) is torch.bfloat16


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[float]], None]:
    def set_times(times: list[float]) -> None:
        readings = iter(times)
        monkeypatch.setattr("time.perf_counter", lambda: next(readings))

    return set_times


def test_a_timing_keeps_the_shortest_time_and_ends_with_its_budget(clock: Callable[[list[float]], None]) -> None:
    clock([0.0, 3.0, 3.0, 4.0, 4.0, 6.0])
    timing = Timing(lambda: None, device=CPU, budget_s=6.0)
    seen = []
    while not timing.is_done:
        timing.run()
        seen.append(timing.best_s)
    assert seen == [3.0, 1.0, 1.0]


def test_an_operation_runs_once_even_without_a_budget() -> None:
    assert not Timing(lambda: None, device=CPU, budget_s=0.0).is_done
