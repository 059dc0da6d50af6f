"""What a folder must hold to be served, and what is read off the loaded model."""

import shutil
from pathlib import Path

import pytest
import torch

from model_worker.models.catalog import resolve
from model_worker.models.loading import LoadedModel, LoadOptions, load, pick_device
from prefixcache.errors import ConfigError
from tests.fakes.tiny_model import EOS
from tests.models.damaging import change_config, change_weights

CPU = torch.device("cpu")


@pytest.fixture
def folder(tiny_folder: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return shutil.copytree(tiny_folder, tmp_path / "copy")


def load_float32(folder: Path, *, max_model_len: int | None = None) -> LoadedModel:
    return load(resolve(str(folder)), LoadOptions("float32", CPU, 8, max_model_len))


def test_a_loaded_model_tells_its_shape(tiny_folder: Path) -> None:
    model = load_float32(tiny_folder)
    assert model.name == "tiny"
    assert model.model_type == "llama"
    assert model.vocab_size == 264
    assert model.max_positions == 512
    assert model.layout.cell_shape == (2, 2, 2, 8, 16)
    assert model.layout.cell_bytes == 2 * 2 * 2 * 8 * 16 * 4
    assert model.causal.eos_token_ids() == (model.tokenizer.encode_rendered(EOS)[0],)
    assert model.packed_bytes > 0
    assert model.weights_bytes > 0


def test_an_output_layer_tied_to_the_embedding_is_not_missing(folder: Path) -> None:
    change_config(folder, tie_word_embeddings=True)
    change_weights(folder, lambda weights: weights.pop("lm_head.weight"))
    assert load_float32(folder).vocab_size == 264


def test_rope_of_an_unknown_kind_is_refused(folder: Path) -> None:
    change_config(folder, rope_parameters={"rope_type": "ntk_by_mood", "rope_theta": 1e4})
    with pytest.raises(ConfigError, match="rope type 'ntk_by_mood' is not known to be independent"):
        load_float32(folder)


def test_dynamic_rope_beyond_the_models_positions_is_refused(folder: Path) -> None:
    change_config(folder, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    with pytest.raises(ConfigError, match=r"513 is more than the 512 positions .* its dynamic rope would depend"):
        load_float32(folder, max_model_len=513)


def test_longrope_is_frozen_by_the_longest_sequence_served(folder: Path) -> None:
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 256}
    change_config(folder, rope_parameters={"rope_type": "longrope", "rope_theta": 1e4, **factors})
    short, longest_short, long = (load_float32(folder, max_model_len=length) for length in (8, 256, 257))
    assert short.rope_digest == longest_short.rope_digest != long.rope_digest
    assert load_float32(folder).max_model_len == 512
    assert load_float32(folder).rope_digest == long.rope_digest


def test_layers_of_an_unknown_kind_are_refused(folder: Path) -> None:
    change_config(folder, layer_types=["chunked_attention", "full_attention"])
    with pytest.raises(ConfigError, match="layer 0 of the model is of type 'chunked_attention'"):
        load_float32(folder)


def test_windows_that_attention_is_not_told_of_are_refused(folder: Path) -> None:
    change_config(folder, layer_types=["full_attention", "sliding_attention"], sliding_window=4)
    with pytest.raises(ConfigError, match="layer 1 of the model is of type 'sliding_attention'"):
        load_float32(folder)


def test_the_rope_digest_sees_theta_and_scaling(folder: Path) -> None:
    digests = []
    for rope in (
        {"rope_type": "default", "rope_theta": 1e4},
        {"rope_type": "default", "rope_theta": 2e4},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
    ):
        change_config(folder, rope_parameters=rope)
        digests.append(load_float32(folder).rope_digest)
    assert len(set(digests)) == 3


def test_a_device_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device("auto") == pick_device("cpu") == CPU
    with pytest.raises(ConfigError, match="sees no CUDA device"):
        pick_device("cuda")
