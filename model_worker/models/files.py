"""What a model's folder must hold, looked at before anything is loaded from it.

transformers loads what it can: weights that are missing it draws at random, and its
errors speak of classes. Here a damaged folder is refused by the file that is wrong.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from prefixcache.errors import ConfigError

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
PICKLED_WEIGHTS = ("pytorch_model.bin", "pytorch_model.bin.index.json")
GGUF_MAGIC = b"GGUF"
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "tokenizer_config.json")


def check_files(folder: Path) -> None:
    """Raise ConfigError with the file that is missing, damaged or unreadable in ``folder``, and what to do."""
    config = read_json(folder / CONFIG)
    if not isinstance(config.get("model_type"), str):
        raise ConfigError(f"{folder / CONFIG} names no model_type; get the whole model in transformers' format")
    try:
        _check_weights(folder)
        _check_tokenizer(folder)
    except OSError as error:
        raise unreadable(folder, error) from error


def check_loaded(folder: Path, report: Mapping[str, Any]) -> None:
    """Raise ConfigError for what transformers' loading report only warns of: weights drawn at random, or left over."""
    misshapen, missing, left_over = (
        sorted(report[name]) for name in ("mismatched_keys", "missing_keys", "unexpected_keys")
    )
    if misshapen:
        name, found, wanted = misshapen[0]
        raise ConfigError(
            f"{len(misshapen)} weights in {folder} have another shape than config.json says, such as {name}: "
            f"{list(found)} and not {list(wanted)}; get config.json and weights of the same model"
        )
    if missing:
        raise ConfigError(
            f"the files in {folder} lack {len(missing)} of the model's weights, such as {missing[0]}, which would be "
            f"drawn at random; get the whole model"
        )
    if left_over:
        raise ConfigError(
            f"the files in {folder} hold {len(left_over)} weights, such as {left_over[0]}, for which the model that "
            f"config.json says has no place; get config.json and weights of the same model"
        )


def check_gguf(path: Path) -> None:
    """Raise ConfigError where ``path`` cannot be read or does not begin as a GGUF file does."""
    try:
        with path.open("rb") as file:
            beginning = file.read(len(GGUF_MAGIC))
    except OSError as error:
        raise unreadable(path, error) from error
    if beginning != GGUF_MAGIC:
        raise ConfigError(f"{path} is no GGUF file: it begins with {beginning!r} and not {GGUF_MAGIC!r}; get it again")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; raises ConfigError where ``path`` cannot be read or holds something else."""
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise unreadable(path, error) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON ({error}); get the file again") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path} holds a JSON {type(found).__name__} and not an object; get the file again")
    return found


def unreadable(path: Path, error: OSError) -> ConfigError:
    """The error for a file or folder that the system does not let this process read."""
    reason = error.strerror or str(error)
    return ConfigError(f"cannot read {path}: {reason}; let the user that runs the worker read it")


def weight_names(folder: Path) -> list[str]:
    """Names of the safetensors files that ``folder``'s model is made of, by its index where it has one; [] for none."""
    if (folder / WEIGHTS).is_file():
        return [WEIGHTS]
    index = folder / WEIGHTS_INDEX
    if not index.is_file():
        return []
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not places or not all(isinstance(name, str) for name in places.values()):
        raise ConfigError(f"{index} has no weight_map from weights to files; get the file again")
    return sorted(set(places.values()))


def _check_weights(folder: Path) -> None:
    names = weight_names(folder)
    if not names and not any((folder / name).is_file() for name in PICKLED_WEIGHTS):
        raise ConfigError(f"{folder} holds no weights (no {WEIGHTS}, no {WEIGHTS_INDEX}); get the whole model")
    absent = [name for name in names if not (folder / name).is_file()]
    if absent:
        raise ConfigError(
            f"{folder} lacks {len(absent)} of the {len(names)} weight files that {WEIGHTS_INDEX} names, such as "
            f"{absent[0]}; get the whole model"
        )
    for name in names:
        _check_safetensors(folder / name)


def _check_safetensors(path: Path) -> None:
    """Read the header, which tells how long the file must be."""
    with path.open("rb"):
        pass
    try:
        with safe_open(path, framework="pt"):
            pass
    except SafetensorError as error:
        raise ConfigError(f"{path} is truncated or no safetensors file ({error}); get the file again") from error


def _check_tokenizer(folder: Path) -> None:
    if not any((folder / name).is_file() for name in TOKENIZERS):
        raise ConfigError(f"{folder} holds no tokenizer (no {TOKENIZERS[0]}); get the whole model")
