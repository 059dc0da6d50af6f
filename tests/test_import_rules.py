import ast
import subprocess
import sys
from pathlib import Path

import pytest

import prefixcache.core
import prefixcache.sim

CORE = Path(prefixcache.core.__path__[0])
SIM = Path(prefixcache.sim.__path__[0])


def imported_top_levels(source: str) -> set[str]:
    nodes = list(ast.walk(ast.parse(source)))
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    from_others = {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and node.level == 0}
    return {name.partition(".")[0] for name in plain | from_others}


@pytest.mark.parametrize("path", sorted(CORE.rglob("*.py")), ids=lambda path: path.name)
def test_core_imports_only_the_standard_library_and_xxhash(path: Path) -> None:
    allowed = sys.stdlib_module_names | {"xxhash", "prefixcache"}
    assert imported_top_levels(path.read_text()) <= allowed


@pytest.mark.parametrize("path", sorted(SIM.rglob("*.py")), ids=lambda path: path.name)
def test_the_simulator_s_side_imports_only_the_standard_library(path: Path) -> None:
    assert imported_top_levels(path.read_text()) <= sys.stdlib_module_names | {"prefixcache"}


def test_importing_the_package_imports_no_store() -> None:
    stores = {"redis", "hiredis", "lmdb"}
    script = (
        f"import sys, prefixcache, prefixcache.cache, prefixcache.storage.tier; print({stores!r} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
