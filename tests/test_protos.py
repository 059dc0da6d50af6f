"""The generated code is what the protos generate, and every element of them is explained."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet

from model_worker.rpc import bounds

REPOSITORY = Path(__file__).resolve().parent.parent
PROTOS = REPOSITORY / "protos"
GENERATED = Path("prefixcache/pb/v1")


def read_generated(root: Path) -> dict[str, str]:
    paths = [*root.glob("*.py"), *root.glob("*.pyi")]
    return {path.name: path.read_text() for path in paths if path.name != "__init__.py"}


def test_committed_code_is_what_the_protos_generate(tmp_path: Path) -> None:
    subprocess.run([sys.executable, PROTOS / "generate.py", tmp_path], check=True)
    assert read_generated(REPOSITORY / GENERATED) == read_generated(tmp_path / GENERATED), "run `make protos`"


def parse_protos(out: Path) -> FileDescriptorSet:
    files = sorted(str(path) for path in PROTOS.rglob("*.proto"))
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTOS}", "--include_source_info"]
    subprocess.run([*command, f"--descriptor_set_out={out}", *files], check=True)
    return FileDescriptorSet.FromString(out.read_bytes())


def elements(file: FileDescriptorProto) -> Iterator[tuple[tuple[int, ...], str]]:
    """Yield the source path and the name of each message, field, enum, value, service and call."""
    for i, message in enumerate(file.message_type):
        yield (4, i), message.name
        yield from (((4, i, 2, j), f"{message.name}.{field.name}") for j, field in enumerate(message.field))
    for i, enum in enumerate(file.enum_type):
        yield (5, i), enum.name
        yield from (((5, i, 2, j), f"{enum.name}.{value.name}") for j, value in enumerate(enum.value))
    for i, service in enumerate(file.service):
        yield (6, i), service.name
        yield from (((6, i, 2, j), f"{service.name}.{method.name}") for j, method in enumerate(service.method))


def test_every_element_of_the_protos_has_a_comment(tmp_path: Path) -> None:
    files = parse_protos(tmp_path / "descriptors").file
    explained = {
        (file.name, *location.path)
        for file in files
        for location in file.source_code_info.location
        if location.leading_comments.strip()
    }
    names = [(name, (file.name, *path) in explained) for file in files for path, name in elements(file)]
    assert len(names) > 100
    assert [name for name, is_explained in names if not is_explained] == []


@pytest.mark.parametrize(
    "figure",
    [
        f"{bounds.MAX_PROMPT_BYTES // 2**20} MiB",
        f"{bounds.MAX_PROMPT_IDS:,}",
        f"{bounds.MAX_CHAT_MESSAGES:,}",
        f"1 to {bounds.MAX_ROLE_BYTES} bytes",
        f"{bounds.MAX_CACHE_SALT_BYTES} bytes",
        f"At most {bounds.MAX_STOP_TEXTS},",
        f"1 to {bounds.MAX_STOP_TEXT_BYTES:,} bytes",
        f"At most {bounds.MAX_STOP_TOKEN_IDS}.",
        f"at least {bounds.MIN_TEMPERATURE}",
        f"{-bounds.MAX_PRIORITY} to {bounds.MAX_PRIORITY}, higher goes first",
    ],
)
def test_comments_give_the_bounds_that_are_checked(figure: str) -> None:
    assert figure in (PROTOS / "prefixcache/pb/v1/worker.proto").read_text()
