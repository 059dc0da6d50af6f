"""Models that bring Python code of their own: refused, and not run, unless the operator trusts it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from model_worker.models.catalog import resolve
from model_worker.models.loading import LoadedModel, LoadOptions, load
from prefixcache import Client
from prefixcache.errors import ConfigError
from tests.models.damaging import change_config

CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM

Path({marker!r}).touch()

class OwnConfig(LlamaConfig):
    model_type = "model_of_its_own"

class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""
PLACES = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnModel"}


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    """A file that the model's code makes when it runs."""
    return tmp_path / "the code ran"


@pytest.fixture
def folder(tiny_folder: Path, tmp_path: Path, marker: Path) -> Path:
    """A model of a type that only its own code knows."""
    copy = shutil.copytree(tiny_folder, tmp_path / "own")
    (copy / "modeling_own.py").write_text(CODE.format(marker=str(marker)))
    change_config(copy, model_type="model_of_its_own", architectures=["OwnModel"], auto_map=PLACES)
    return copy


def load_float32(folder: Path, *, is_code_trusted: bool) -> LoadedModel:
    options = LoadOptions("float32", torch.device("cpu"), 8, is_code_trusted=is_code_trusted)
    return load(resolve(str(folder)), options)


def test_code_is_refused_and_not_run_unless_it_is_trusted(folder: Path, marker: Path) -> None:
    with pytest.raises(ConfigError, match=r"code of its own \(modeling_own\.py\).* start with --trust-remote-code"):
        load_float32(folder, is_code_trusted=False)
    assert not marker.exists()


def test_a_tokenizers_code_is_refused_too(tiny_folder: Path, tmp_path: Path, marker: Path) -> None:
    copy = shutil.copytree(tiny_folder, tmp_path / "own")
    (copy / "own_tokens.py").write_text(CODE.format(marker=str(marker)))
    config = json.loads((copy / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "OwnTokens", "auto_map": {"AutoTokenizer": [None, "own_tokens.OwnTokens"]}}
    (copy / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"\(own_tokens\.py\)"):
        load_float32(copy, is_code_trusted=False)
    assert not marker.exists()


def test_a_type_that_transformers_knows_is_loaded_without_the_models_code(folder: Path, marker: Path) -> None:
    change_config(folder, model_type="llama", architectures=["LlamaForCausalLM"])
    assert load_float32(folder, is_code_trusted=False).model_type == "llama"
    assert not marker.exists()


def test_trusted_code_is_part_of_the_models_identity(tiny_folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(tiny_folder, tmp_path / "copy")
    digests = []
    for text in ("x = 1", "x = 2"):
        (copy / "modeling.py").write_text(text)
        digests.append(load_float32(copy, is_code_trusted=True).weights_digest)
    (copy / "modeling.py").write_text("x = 3")
    digests.append(load_float32(copy, is_code_trusted=False).weights_digest)
    assert len(set(digests)) == 3
    assert digests[2] == load_float32(tiny_folder, is_code_trusted=False).weights_digest


def test_trusted_code_is_run_and_its_model_served(folder: Path, marker: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "model_worker", "--model", str(folder), "--trust-remote-code", "--device", "cpu"]
    command += ["--listen", "127.0.0.1:0", "--l1-bytes", "1MB", "--threads", "1", "--block-size", "8"]
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache"), "HF_MODULES_CACHE": str(tmp_path / "code")}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    with subprocess.Popen(command, env=environment, **pipes) as worker:
        try:
            assert worker.stdout is not None
            address = json.loads(worker.stdout.readline())["address"]
            with Client(address) as client:
                cold, hit = (client.generate([1, 2, 3] * 8, max_new_tokens=4, ignore_eos=True) for _ in range(2))
        finally:
            worker.terminate()
    assert marker.exists()
    assert (cold.usage.cached_prompt_tokens, hit.usage.cached_prompt_tokens) == (0, 16)
    assert cold.token_ids == hit.token_ids
