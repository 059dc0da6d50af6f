"""Digests of model files' bytes: two fine-tunes may agree in every name and shape.

A digest may be remembered in a folder, by what the file system says of the file. That is
a hint which saves reading gigabytes at each start; losing it costs time, nothing else.
"""

import hashlib
import json
import os
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".gguf", ".pt")
SETTLED_S = 2.0


def file_digest(path: Path, *, memory: Path | None = None) -> bytes:
    """SHA-256 of a file's bytes (about 1.8 GB/s a core; hashing releases the GIL).

    With ``memory``, a folder, it is recalled from there for a file whose path, size, times
    and inode are those it had when it was hashed; else hashed, and noted there.
    """
    if memory is None:
        return _hashed(path)
    note = memory / f"{hashlib.sha256(os.fsencode(path.resolve())).hexdigest()}.json"
    before = _looks(path)
    digest = _recalled(note, before)
    if digest is None:
        digest = _hashed(path)
        if before == _looks(path) and _is_settled(path):
            _remember(note, before, digest)
    return digest


def folder_digests(folder: Path, *, skip: Iterable[str] = (), memory: Path | None = None) -> dict[str, bytes]:
    """Digest of every file directly in ``folder``, by name in sorted order; ``memory`` as in ``file_digest``."""
    left_out = set(skip)
    paths = sorted(path for path in folder.iterdir() if path.is_file() and path.name not in left_out)
    return _digests(paths, memory)


def weights_digest(folder: Path, *, memory: Path | None = None) -> bytes:
    """One digest over all weight files of a folder: names and bytes, in sorted order; SHA-256 of nothing for none."""
    return _joined(sorted(path for path in folder.iterdir() if path.suffix in WEIGHT_SUFFIXES), memory)


def code_digest(folder: Path, *, memory: Path | None = None) -> bytes:
    """As ``weights_digest``, of the Python files directly in ``folder``."""
    return _joined(sorted(folder.glob("*.py")), memory)


def _joined(paths: list[Path], memory: Path | None) -> bytes:
    total = hashlib.sha256()
    for name, digest in _digests(paths, memory).items():
        total.update(len(name).to_bytes(4, "little") + name.encode() + digest)
    return total.digest()


def _digests(paths: list[Path], memory: Path | None) -> dict[str, bytes]:
    with ThreadPoolExecutor(max_workers=4) as pool:
        digests = pool.map(lambda path: file_digest(path, memory=memory), paths)
        return dict(zip((path.name for path in paths), digests, strict=True))


def _hashed(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def _looks(path: Path) -> list[int]:
    """What changes with a file's bytes, even where its modification time is set back."""
    found = path.stat()
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_dev]


def _is_settled(path: Path) -> bool:
    """Whether a change from now on would show: a file changed a moment ago may change again within one clock tick."""
    found = path.stat()
    return time.time() - max(found.st_mtime, found.st_ctime) > SETTLED_S


def _recalled(note: Path, looks: list[int]) -> bytes | None:
    try:
        found = json.loads(note.read_text())
        digest = bytes.fromhex(found["sha256"])
        return digest if found["looks"] == looks and len(digest) == hashlib.sha256().digest_size else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _remember(note: Path, looks: list[int], digest: bytes) -> None:
    with suppress(OSError):
        note.parent.mkdir(parents=True, exist_ok=True)
        part = note.with_suffix(f".{os.getpid()}.part")
        part.write_text(json.dumps({"looks": looks, "sha256": digest.hex()}))
        part.replace(note)
