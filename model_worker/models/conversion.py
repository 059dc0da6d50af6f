"""A GGUF file parsed once: a converted copy that later starts load in under a second.

transformers reads a GGUF file's metadata three times in Python (half a minute for
the demo model). The copy lives under the user's cache folder, keyed by the file's
digest, the dtype and transformers' version, and is trusted only as far as its
manifest's digests hold. Losing it costs time, nothing else.
"""

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from model_worker.models.digest import file_digest, folder_digests
from model_worker.models.transformers_adapter import convert_gguf, library_version

MANIFEST = "manifest.json"
WORK_PREFIX = ".converting-"
LEFTOVER_S = 86_400.0


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/prefixcache/models``, by default under ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "prefixcache" / "models"


def digest_folder() -> Path:
    """Where digests of model files are remembered, next to converted models."""
    return cache_folder().parent / "digests"


def converted_folder(
    gguf: Path, *, dtype: str, root: Path, on_convert: Callable[[str], None], memory: Path | None = None
) -> Path:
    """The folder of ``gguf``'s converted copy in ``dtype`` under ``root``, made now where absent or damaged.

    ``on_convert`` is told, once, when a conversion starts; ``memory`` is that of
    ``file_digest``. Two processes may convert at the same time: each writes its own folder
    and the first to rename wins. Raises OSError where ``root`` cannot be written.
    """
    source = file_digest(gguf, memory=memory).hex()
    target = root / f"{gguf.stem}-{dtype}-{source[:16]}-{library_version()}"
    if _is_intact(target, source, memory=memory):
        return target
    on_convert(f"converting {gguf.name} to {dtype} once; later starts load {target}")
    root.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(root)
    work = Path(tempfile.mkdtemp(prefix=WORK_PREFIX, dir=root))
    try:
        convert_gguf(gguf, dtype=dtype, target=work)
        digests = {name: digest.hex() for name, digest in folder_digests(work).items()}
        (work / MANIFEST).write_text(json.dumps({"source": source, "files": digests}, indent=1))
        _replace(work, target, source)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def _remove_leftovers(root: Path) -> None:
    """Remove what processes that were ended a day ago or earlier had begun to convert."""
    for folder in root.glob(f"{WORK_PREFIX}*"):
        with suppress(OSError):
            if time.time() - folder.stat().st_mtime > LEFTOVER_S:
                shutil.rmtree(folder)


def _is_intact(folder: Path, source: str, *, memory: Path | None = None) -> bool:
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        if manifest["source"] != source:
            return False
        found = folder_digests(folder, skip=(MANIFEST,), memory=memory)
        return bool({name: digest.hex() for name, digest in found.items()} == manifest["files"])
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _replace(work: Path, target: Path, source: str) -> None:
    if target.exists():
        if _is_intact(target, source):
            return
        shutil.rmtree(target)
    try:
        work.rename(target)
    except OSError:
        if not _is_intact(target, source):
            raise
