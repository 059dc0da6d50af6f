"""Models that cannot be served: the worker ends with 2, says what is wrong and what to do, and serves nothing."""

import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import pytest
import torch
from gguf import GGUFWriter
from tokenizers import Tokenizer

from model_worker import __main__
from model_worker.models.transformers_adapter import CausalModel
from model_worker.worker import Worker
from tests.models.damaging import change_config, change_weights, shard

Refusal: TypeAlias = Callable[..., str]
UNPRIVILEGED = 65_534


@pytest.fixture
def folder(tiny_folder: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return shutil.copytree(tiny_folder, tmp_path / "copy")


@pytest.fixture
def refusal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Iterator[Refusal]:
    """What a worker's log says of a model it refuses, in one line of an error."""

    async def serve(*_: object) -> None:
        pytest.fail("the model was served")

    def refuse(model: object, *flags: str) -> str:
        code = __main__.main(["--model", str(model), "--device", "cpu", "--listen", "127.0.0.1:0", *flags])
        said = capsys.readouterr()
        assert (code, said.out) == (2, "")
        assert "Traceback" not in said.err
        return said.err[said.err.index("ERROR") :]

    monkeypatch.setattr(__main__, "serve", serve)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.getsignal(number) for number in numbers]
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield refuse
    root.handlers[:] = handlers
    root.setLevel(level)
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def test_a_missing_folder(refusal: Refusal, tmp_path: Path) -> None:
    assert f"no model '{tmp_path / 'absent'}': neither a catalogue name" in refusal(tmp_path / "absent")


def test_a_folder_without_a_config(refusal: Refusal, folder: Path) -> None:
    (folder / "config.json").unlink()
    assert "has no config.json and no .gguf file; name the folder of one model" in refusal(folder)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "config.json is not JSON (Expecting property name enclosed in double quotes"),
        ("[]", "config.json holds a JSON list and not an object; get the file again"),
        ("[" * 100_000, "config.json is not JSON"),
        ("\ud800", "config.json is not JSON"),
        ("{}", "config.json names no model_type; get the whole model in transformers' format"),
        ('{"model_type": "no-such-type"}', "serve a causal language model of a type that transformers"),
        ('{"model_type": "vit"}', "serve a causal language model of a type that transformers"),
    ],
)
def test_a_config_that_describes_no_language_model(refusal: Refusal, folder: Path, text: str, message: str) -> None:
    (folder / "config.json").write_text(text, encoding="utf-8", errors="surrogatepass")
    said = refusal(folder)
    assert message in said
    assert str(folder) in said


def test_no_weights(refusal: Refusal, folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert f"{folder} holds no weights (no model.safetensors, " in refusal(folder)


@pytest.mark.parametrize("size", [0, 4, 1_000, -1])
def test_truncated_weights(refusal: Refusal, folder: Path, size: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    said = refusal(folder)
    assert f"{path} is truncated or no safetensors file (" in said
    assert "get the file again" in said


def test_a_truncated_shard(refusal: Refusal, folder: Path) -> None:
    path = shard(folder)[1]
    path.write_bytes(path.read_bytes()[:-1])
    assert f"{path} is truncated or no safetensors file (" in refusal(folder)


def test_a_missing_shard(refusal: Refusal, folder: Path) -> None:
    path = shard(folder)[1]
    path.unlink()
    said = refusal(folder)
    assert f"lacks 1 of the 2 weight files that model.safetensors.index.json names, such as {path.name}" in said


@pytest.mark.parametrize("places", [None, {}, [], {"weight": 1}])
def test_an_index_without_files(refusal: Refusal, folder: Path, places: object) -> None:
    shard(folder)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    assert "model.safetensors.index.json has no weight_map from weights to files" in refusal(folder)


def test_weights_that_are_missing_are_never_drawn_at_random(refusal: Refusal, folder: Path) -> None:
    change_weights(folder, lambda weights: weights.pop("model.layers.1.mlp.up_proj.weight"))
    said = refusal(folder)
    assert "lack 1 of the model's weights, such as model.layers.1.mlp.up_proj.weight, which would be drawn" in said


def test_weights_of_another_shape(refusal: Refusal, folder: Path) -> None:
    change_weights(folder, lambda weights: weights.update({"model.norm.weight": torch.ones(3)}))
    said = refusal(folder)
    assert "have another shape than config.json says, such as model.norm.weight: [3] and not [64]" in said


def test_weights_for_which_the_model_has_no_place(refusal: Refusal, folder: Path) -> None:
    change_weights(folder, lambda weights: weights.update({"model.layers.7.extra.weight": torch.ones(3)}))
    assert "hold 1 weights, such as model.layers.7.extra.weight, for which the model" in refusal(folder)


def test_a_config_with_fewer_layers_than_the_weights(refusal: Refusal, folder: Path) -> None:
    change_config(folder, num_hidden_layers=1, layer_types=None)
    assert "such as model.layers.1.input_layernorm.weight, for which the model" in refusal(folder)


def test_weights_of_another_architecture(refusal: Refusal, folder: Path) -> None:
    change_config(folder, model_type="gpt_neox", architectures=["GPTNeoXForCausalLM"])
    said = refusal(folder)
    assert f"the files in {folder} lack" in said


def test_no_tokenizer(refusal: Refusal, folder: Path) -> None:
    for path in folder.glob("*token*"):
        path.unlink()
    assert f"{folder} holds no tokenizer (no tokenizer.json); get the whole model" in refusal(folder)


@pytest.mark.parametrize("text", ["{", "[]", "{}"])
def test_a_damaged_tokenizer(refusal: Refusal, folder: Path, text: str) -> None:
    (folder / "tokenizer.json").write_text(text)
    assert f"cannot load the model in {folder}: " in refusal(folder)


def test_a_tokenizer_with_ids_beyond_the_models_vocabulary(refusal: Refusal, folder: Path) -> None:
    path = str(folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    tokenizer.add_special_tokens(["<|one more|>"])
    tokenizer.save(path)
    assert "has token ids up to 264 and the model a vocabulary of 264; get tokenizer and model" in refusal(folder)


def test_a_config_without_a_vocabulary(refusal: Refusal, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CausalModel, "config", property(lambda _: {"model_type": "several"}))
    assert "has no vocab_size of its own, as the configs of models for several kinds of input" in refusal(folder)


@pytest.fixture
def locked_folder(folder: Path) -> Iterator[Path]:
    """A folder that this process may not read, whoever it runs as."""
    is_root = os.geteuid() == 0
    folder.chmod(0)
    if is_root:
        os.seteuid(UNPRIVILEGED)
    yield folder
    if is_root:
        os.seteuid(0)
    folder.chmod(0o755)


def test_a_folder_that_cannot_be_read(refusal: Refusal, locked_folder: Path) -> None:
    said = refusal(locked_folder)
    assert f"cannot read {locked_folder}: Permission denied; let the user that runs the worker read it" in said


def write_gguf(path: Path) -> bytes:
    """A GGUF file of a llama without weights that matter; its bytes."""
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_tensor("token_embd.weight", torch.ones(8, 32).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


@pytest.mark.parametrize(
    ("share", "cause"),
    [(0.1, "requires a buffer of at least|out of bounds"), (0.5, "cannot reshape"), (0.99, "cannot reshape")],
)
def test_a_truncated_gguf(refusal: Refusal, tmp_path: Path, share: float, cause: str) -> None:
    path = tmp_path / "Tiny.gguf"
    content = write_gguf(path)
    path.write_bytes(content[: int(share * len(content))])
    said = refusal(path)
    assert re.search(rf"cannot read the model in {path}: .*({cause}).*; get the file again", said)


@pytest.mark.parametrize(("content", "beginning"), [(b"", b""), (b"<html>no such page</html>", b"<htm")])
def test_a_file_that_is_no_gguf(refusal: Refusal, tmp_path: Path, content: bytes, beginning: bytes) -> None:
    path = tmp_path / "Tiny.gguf"
    path.write_bytes(content)
    assert f"{path} is no GGUF file: it begins with {beginning!r} and not b'GGUF'; get it again" in refusal(path)


def test_a_sharded_model_that_is_whole_is_served(build_tiny: Callable[..., Worker], folder: Path) -> None:
    shard(folder)
    assert build_tiny(model=str(folder)).model.vocab_size == 264


def test_the_process_ends_with_2_and_no_traceback(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"damaged")
    command = [sys.executable, "-m", "model_worker", "--model", str(folder), "--device", "cpu"]
    ended = subprocess.run([*command, "--listen", "127.0.0.1:0"], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "get the file again" in ended.stderr
    assert "Traceback" not in ended.stderr
