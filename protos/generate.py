"""Generate ``prefixcache/pb/v1`` from the protos: ``python protos/generate.py [OUT]``.

OUT is the folder that gets ``prefixcache/pb/v1``; by default the repository.
Needs the packages of the ``dev`` extra.
"""

import sys
from pathlib import Path

import grpc_tools
from grpc_tools import protoc

PROTOS = Path(__file__).resolve().parent
REPOSITORY = PROTOS.parent


def generate(out: Path) -> None:
    """Write messages, stubs and their type stubs under ``out``; RuntimeError when protoc fails."""
    scripts = Path(sys.executable).parent
    arguments = [
        "protoc",
        f"-I{PROTOS}",
        f"-I{Path(grpc_tools.__file__).parent / '_proto'}",
        f"--plugin=protoc-gen-mypy={scripts / 'protoc-gen-mypy'}",
        f"--plugin=protoc-gen-mypy_grpc={scripts / 'protoc-gen-mypy_grpc'}",
        f"--python_out={out}",
        f"--mypy_out=quiet:{out}",
        f"--grpc_python_out={out}",
        f"--mypy_grpc_out=quiet,only_async:{out}",
        *(str(path) for path in sorted(PROTOS.rglob("*.proto"))),
    ]
    if protoc.main(arguments):
        raise RuntimeError(f"protoc failed with the arguments {arguments[1:]}; its message is above")


if __name__ == "__main__":
    generate(Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else REPOSITORY)
