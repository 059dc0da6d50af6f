"""A model that breaks one of the rules is refused by the name of the check; passing is remembered."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from model_worker.models import qualification
from model_worker.models.catalog import resolve
from model_worker.models.checks import CHECKS
from model_worker.models.loading import LoadedModel, LoadOptions, load, probe_partition
from model_worker.models.qualification import Circumstances, qualify, run_checks
from model_worker.models.row_probe import probe_rows
from model_worker.models.transformers_adapter import CausalModel
from prefixcache.errors import ConfigError

MAX_ROWS = 4

Change = Callable[[Tensor], Tensor]


@pytest.fixture
def model(tiny_folder: Path) -> LoadedModel:
    return load(resolve(str(tiny_folder)), LoadOptions("float32", torch.device("cpu"), 8))


MACHINE = {"processor": "one"}
CIRCUMSTANCES = Circumstances(b"identity", MACHINE, MAX_ROWS)


def check(model: LoadedModel, row_counts: tuple[int, ...] | None = None) -> dict[str, str]:
    """Run the checks; with row counts found before the model was changed."""
    return run_checks(
        model, row_counts or allowed_rows(model), max_rows=MAX_ROWS, partition=probe_partition(model, max_rows=MAX_ROWS)
    )


def allowed_rows(model: LoadedModel) -> tuple[int, ...]:
    return probe_rows(model.causal.model, max_rows=MAX_ROWS)


def change_embeddings(model: LoadedModel, change: Change) -> None:
    """Pass the embeddings ``[rows, hidden_size]`` of every forward through ``change``."""
    embed: Any = model.causal.model.get_input_embeddings()
    embed.register_forward_hook(lambda module, inputs, output: change(output[0]).unsqueeze(0))


def sees_the_future(rows: Tensor) -> Tensor:
    return rows + 0.1 * rows.mean(0)


class SeesTheRowBefore:
    """As a model that mixes neighbouring tokens and keeps no state for it: a block's first token has no neighbour."""

    def __call__(self, rows: Tensor) -> Tensor:
        before = torch.cat((torch.zeros_like(rows[:1]), rows[:-1]))
        return rows + before if rows.shape[0] >= 8 else rows


class RemembersTheLongest:
    """As dynamic rope: what was seen once changes all that follows."""

    def __init__(self) -> None:
        self.longest = 0

    def __call__(self, rows: Tensor) -> Tensor:
        self.longest = max(self.longest, rows.shape[0])
        return rows * (1 + (self.longest >= 16) * 0.01)


def few_rows_differ(rows: Tensor) -> Tensor:
    return rows * (1.001 if rows.shape[0] == 3 else 1.0)


def test_a_sound_model_passes_and_says_what_was_measured(model: LoadedModel) -> None:
    found = check(model)
    assert list(found) == list(CHECKS) == ["causality", "chaining", "no history", "rows", "lengths"]
    assert found["causality"] == "7 tokens unchanged"
    assert found["rows"] == "equal in batches of 1, 2, 3, 4"
    assert found["lengths"] == "equal at lengths 1, 20, 8, 5"


@pytest.mark.parametrize(
    ("name", "change", "advice"),
    [
        ("causality", sees_the_future, "serve a model that is causal as configured"),
        ("chaining", SeesTheRowBefore(), "it keeps state outside its KV"),
        ("rows", few_rows_differ, "lower --max-num-seqs to 1"),
    ],
)
def test_a_model_that_breaks_a_rule_is_refused_by_the_checks_name(
    model: LoadedModel, name: str, change: Change, advice: str
) -> None:
    allowed = allowed_rows(model)
    change_embeddings(model, change)
    with pytest.raises(ConfigError, match=f"model 'tiny' fails the check '{name}': .*{advice}"):
        check(model, allowed)


@pytest.mark.parametrize("name", list(CHECKS))
def test_each_check_alone_finds_its_fault(model: LoadedModel, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(qualification, "CHECKS", {name: CHECKS[name]})
    allowed = allowed_rows(model)
    check(model, allowed)
    if name == "lengths":
        mix_unequal_lengths(monkeypatch)
    else:
        faults: dict[str, Change] = {
            "causality": sees_the_future,
            "chaining": SeesTheRowBefore(),
            "no history": RemembersTheLongest(),
            "rows": few_rows_differ,
        }
        change_embeddings(model, faults[name])
    with pytest.raises(ConfigError, match=f"fails the check '{name}'"):
        check(model, allowed)


def mix_unequal_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """As an attention kernel that splits its work by the longest sequence of a batch."""
    forward = CausalModel.forward_logits

    def forward_logits(causal: CausalModel, *args: Any, num_logits: int) -> Tensor:
        batch = args[2]
        starts = {span.start for span in batch.spans} | set(
            () if batch.decode is None else batch.decode.positions.tolist()
        )
        return forward(causal, *args, num_logits=num_logits) * (1.0 if len(starts) == 1 else 1.001)

    monkeypatch.setattr(CausalModel, "forward_logits", forward_logits)


def test_a_model_whose_code_fails_is_refused_with_what_it_said(model: LoadedModel) -> None:
    def fail(rows: Tensor) -> Tensor:
        raise RuntimeError("no kernel for this")

    allowed = allowed_rows(model)
    change_embeddings(model, fail)
    with pytest.raises(ConfigError, match=r"fails in the engine \(RuntimeError: no kernel for this\)"):
        check(model, allowed)


def refuse_to_probe(model: object, *, max_rows: int) -> tuple[int, ...]:
    raise AssertionError("the row probe ran though its result is remembered")


def test_passing_is_remembered_and_costs_neither_checks_nor_row_probe(
    model: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = qualify(model, CIRCUMSTANCES, folder=tmp_path / "new")
    monkeypatch.setattr(qualification, "probe_rows", refuse_to_probe)
    again = qualify(model, CIRCUMSTANCES, folder=tmp_path / "new")
    assert (first.is_remembered, again.is_remembered) == (False, True)
    assert (again.checks, again.row_counts) == (first.checks, first.row_counts)
    assert first.row_counts == allowed_rows(model)


@pytest.mark.parametrize(
    "other",
    [
        Circumstances(b"other", MACHINE, MAX_ROWS),
        Circumstances(b"identity", {"processor": "two"}, MAX_ROWS),
        Circumstances(b"identity", MACHINE | {"cores": "1"}, MAX_ROWS),
        Circumstances(b"identity", MACHINE, MAX_ROWS + 1),
    ],
)
def test_nothing_is_remembered_of_another_identity_machine_or_batch_size(
    model: LoadedModel, tmp_path: Path, other: Circumstances
) -> None:
    qualify(model, CIRCUMSTANCES, folder=tmp_path)
    assert not qualify(model, other, folder=tmp_path).is_remembered


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"causality": 1}', "\x00", '{"checks": {"rows": "equal"}}'])
def test_a_damaged_memory_is_ignored_and_mended(model: LoadedModel, tmp_path: Path, text: str) -> None:
    qualify(model, CIRCUMSTANCES, folder=tmp_path)
    (path,) = tmp_path.iterdir()
    path.write_text(text)
    assert not qualify(model, CIRCUMSTANCES, folder=tmp_path).is_remembered
    assert qualify(model, CIRCUMSTANCES, folder=tmp_path).is_remembered


@pytest.mark.parametrize(
    "counts", ["[]", "[1, 2]", "[2, 1, 8]", "[1, 1, 8]", "[0, 8]", '["8"]', "[true, 8]", "8", "null"]
)
def test_row_counts_that_cannot_be_are_not_believed(model: LoadedModel, tmp_path: Path, counts: str) -> None:
    found = qualify(model, CIRCUMSTANCES, folder=tmp_path)
    (path,) = tmp_path.iterdir()
    path.write_text(f'{{"row_counts": {counts}, "checks": {json.dumps(found.checks)}}}')
    assert not qualify(model, CIRCUMSTANCES, folder=tmp_path).is_remembered


def test_a_folder_that_cannot_be_written_costs_nothing_but_time(model: LoadedModel, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for _ in range(2):
        assert not qualify(model, CIRCUMSTANCES, folder=tmp_path / "file").is_remembered


def test_failing_is_not_remembered(model: LoadedModel, tmp_path: Path) -> None:
    change_embeddings(model, sees_the_future)
    with pytest.raises(ConfigError, match="causality"):
        qualify(model, CIRCUMSTANCES, folder=tmp_path)
    assert list(tmp_path.iterdir()) == []
