"""Digests of model files' bytes: two fine-tunes may agree in every name and shape."""

import hashlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".gguf", ".pt")


def file_digest(path: Path) -> bytes:
    """SHA-256 of a file's bytes (about 1.8 GB/s a core; hashing releases the GIL)."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def _digests(paths: list[Path]) -> dict[str, bytes]:
    with ThreadPoolExecutor(max_workers=4) as pool:
        return dict(zip((path.name for path in paths), pool.map(file_digest, paths), strict=True))


def folder_digests(folder: Path, *, skip: Iterable[str] = ()) -> dict[str, bytes]:
    """Digest of every file directly in ``folder``, by name in sorted order."""
    left_out = set(skip)
    return _digests(sorted(path for path in folder.iterdir() if path.is_file() and path.name not in left_out))


def weights_digest(folder: Path) -> bytes:
    """One digest over all weight files of a folder: names and bytes, in sorted order; SHA-256 of nothing for none."""
    return _joined(sorted(path for path in folder.iterdir() if path.suffix in WEIGHT_SUFFIXES))


def code_digest(folder: Path) -> bytes:
    """As ``weights_digest``, of the Python files directly in ``folder``."""
    return _joined(sorted(folder.glob("*.py")))


def _joined(paths: list[Path]) -> bytes:
    total = hashlib.sha256()
    for name, digest in _digests(paths).items():
        total.update(len(name).to_bytes(4, "little") + name.encode() + digest)
    return total.digest()
