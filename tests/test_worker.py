"""The composition root: identity, limits and what a worker tells of itself."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from model_worker import memory_plan, worker
from model_worker.models import loading
from model_worker.models.catalog import ModelSource
from model_worker.models.loading import LoadedModel, LoadOptions
from model_worker.worker import Worker
from prefixcache.errors import ConfigError, NotFound
from tests.fakes.tiny_model import write_tiny_model

Build = Callable[..., Worker]


def digest(built: Worker) -> bytes:
    return built.namespace.digest()


def test_equal_settings_and_files_give_one_identity(build_tiny: Build, tiny_folder: Path, tmp_path: Path) -> None:
    moved = shutil.copytree(tiny_folder, tmp_path / "of another name")
    (moved / "README.md").write_text("says nothing of the weights")
    base = build_tiny()
    assert digest(build_tiny()) == digest(base)
    assert digest(build_tiny(model=str(moved))) == digest(base)
    assert digest(build_tiny(max_num_seqs=2, l1_bytes=1 << 16, max_model_len=100, max_waiting=1)) == digest(base)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"dtype": "bfloat16"}, "kv_dtype"),
        ({"block_size": 16}, "block_size"),
        ({"num_threads": 2}, "profile.threads"),
    ],
)
def test_each_setting_that_decides_the_kv_is_in_the_identity(
    build_tiny: Build, changes: dict[str, object], field: str
) -> None:
    base, other = build_tiny(), build_tiny(**changes)
    assert digest(other) != digest(base)
    assert other.namespace.fields()[field] != base.namespace.fields()[field]


def test_weights_are_known_by_their_bytes(build_tiny: Build, tiny_folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(tiny_folder, tmp_path / "tiny")
    weights = bytearray((copy / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (copy / "model.safetensors").write_bytes(weights)
    base, other = build_tiny(), build_tiny(model=str(copy))
    assert other.namespace.weights_digest != base.namespace.weights_digest
    assert other.namespace.model_config == base.namespace.model_config
    assert digest(other) != digest(base)


def test_files_are_hashed_at_every_start_where_that_is_asked(
    build_tiny: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Path | None] = []

    def load_and_note(source: ModelSource, options: LoadOptions) -> LoadedModel:
        seen.append(options.digest_memory)
        return loading.load(source, options)

    monkeypatch.setattr(worker, "load", load_and_note)
    base = build_tiny()
    assert digest(build_tiny(verifies_weights=True)) == digest(base)
    assert [memory is None for memory in seen] == [False, True]


def test_rope_is_in_the_identity(build_tiny: Build, tmp_path: Path) -> None:
    base = build_tiny(model=str(write_tiny_model(tmp_path / "base")))
    other = build_tiny(model=str(write_tiny_model(tmp_path / "other", rope_theta=20_000.0)))
    assert other.namespace.weights_digest == base.namespace.weights_digest
    assert other.namespace.rope_digest != base.namespace.rope_digest
    assert other.namespace.profile["canary"] != base.namespace.profile["canary"]


def test_what_is_told_is_what_was_built(build_tiny: Build) -> None:
    built = build_tiny(max_model_len=100)
    told = built.engine.description
    assert (told.model, told.model_type, told.device, told.dtype) == ("tiny", "llama", "cpu", "float32")
    assert (told.max_model_len, told.max_num_seqs, told.block_size, told.vocab_size) == (100, 4, 8, 264)
    assert told.block_bytes == built.model.layout.cell_bytes
    assert told.namespace_digest == digest(built).hex()
    assert told.namespace_fields["profile.threads"] == "1"
    assert told.memory_plan_bytes["l1"] == 1 << 20
    assert told.memory_plan_bytes["slots"] == built.slots.total_bytes
    assert told.memory_plan_bytes["scores"] == 2 * max(2 * 8, 2 * 4 * 4) * 100 * 4
    assert told.has_chat_template
    assert told.is_cache_enabled


def test_without_a_wish_the_models_own_window_and_64_token_blocks_are_taken(build_tiny: Build) -> None:
    told = build_tiny(block_size=None).engine.description
    assert (told.max_model_len, told.block_size) == (512, 64)


def test_more_tokens_than_the_model_has_positions_are_refused(build_tiny: Build) -> None:
    with pytest.raises(ConfigError, match="--max-model-len 513 is more than the 512 positions"):
        build_tiny(max_model_len=513)


def test_blocks_longer_than_the_model_has_positions_are_refused(build_tiny: Build) -> None:
    with pytest.raises(ConfigError, match="--block-size 513 is more than the 512 positions"):
        build_tiny(block_size=513)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_model_len": 1, "is_cache_enabled": False}, "--max-model-len 1 leaves no room .* at least 2"),
        (
            {"max_model_len": 9},
            "--max-model-len 9 is too short .* a block of 8 tokens .* at least 10, ",
        ),
    ],
)
def test_a_window_in_which_nothing_could_be_served_or_hit_is_refused(
    build_tiny: Build, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        build_tiny(**changes)


@pytest.mark.parametrize("changes", [{"max_model_len": 2, "is_cache_enabled": False}, {"max_model_len": 10}])
def test_the_shortest_windows_are_served(build_tiny: Build, changes: dict[str, object]) -> None:
    assert build_tiny(**changes).engine.description.max_model_len == changes["max_model_len"]


@pytest.mark.parametrize("l1_bytes", [0, 4095])
def test_an_l1_that_holds_no_block_turns_caching_off_and_says_so(
    build_tiny: Build, l1_bytes: int, caplog: pytest.LogCaptureFixture
) -> None:
    told = build_tiny(l1_bytes=l1_bytes).engine.description
    assert not told.is_cache_enabled
    assert f"--l1-bytes {l1_bytes} holds no block of 4096 bytes: caching is off" in caplog.text


def test_a_plan_beyond_the_memory_is_refused_before_anything_is_taken(
    build_tiny: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "available_bytes", lambda: memory_plan.PROCESS_BYTES)
    with pytest.raises(ConfigError, match=r"l1 1\.05 MB.*lower --l1-bytes"):
        build_tiny()


def test_more_slots_than_memory_can_ever_hold_are_refused_by_the_plan(build_tiny: Build) -> None:
    with pytest.raises(ConfigError, match=r"slots 262 GB.*lower "):
        build_tiny(max_num_seqs=1_000_000)


def test_a_cache_that_is_off_takes_no_memory(build_tiny: Build) -> None:
    told = build_tiny(is_cache_enabled=False).engine.description
    assert told.memory_plan_bytes["l1"] == 0


def test_a_model_that_does_not_exist_is_not_found(build_tiny: Build) -> None:
    with pytest.raises(NotFound, match="no model 'no-such-model'"):
        build_tiny(model="no-such-model")


def test_the_arena_is_written_by_the_runner_and_seen_by_the_cache(build_tiny: Build) -> None:
    built = build_tiny()
    slot = built.slots.take()
    slot.kv.copy_(torch.arange(slot.kv.numel()).view(slot.kv.shape))
    runner = built.engine._loop.state.parts.runner
    assert runner._cells is not None
    (cell,) = built.cache.reserve(1)
    runner._cells.store(slot, 0, cell)
    arena = built.cache._arena  # type: ignore[attr-defined]
    seen = torch.frombuffer(arena.view(cell), dtype=torch.float32).view(built.model.layout.cell_shape)
    assert torch.equal(seen, slot.kv[:, :, :, :8])
