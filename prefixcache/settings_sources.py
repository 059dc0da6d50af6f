"""Where settings come from besides flags: a TOML file and ``PREFIXCACHE_*`` variables.

Flags win over variables, variables over the file, the file over defaults. A name
that no setting has is an error wherever it stands, so that a typing mistake cannot
pass as a setting.
"""

import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Final

from prefixcache.errors import ConfigError

PREFIX: Final = "PREFIXCACHE_"
CONFIG_VARIABLE: Final = "PREFIXCACHE_CONFIG"
OF_THE_CLIENT: Final = frozenset({"PREFIXCACHE_ADDRESS", CONFIG_VARIABLE})

Value = str | bool


def read_settings(names: Collection[str], environment: Mapping[str, str], *, file: Path | None) -> dict[str, Value]:
    """Settings by name, such as ``l1_bytes``, from the file's ``[worker]`` table and the environment.

    Values are as written, true and false apart. Raises ConfigError for a file that cannot
    be read, and for unknown names with the nearest that exist.

    >>> variables = {"PREFIXCACHE_L1_BYTES": "2GB", "PREFIXCACHE_NO_CACHE": "yes"}
    >>> read_settings({"l1_bytes", "no_cache"}, variables, file=None)
    {'l1_bytes': '2GB', 'no_cache': True}
    """
    path = file or (Path(environment[CONFIG_VARIABLE]) if environment.get(CONFIG_VARIABLE) else None)
    found = {} if path is None else _from_file(names, path)
    return found | _from_environment(names, environment)


def _from_environment(names: Collection[str], environment: Mapping[str, str]) -> dict[str, Value]:
    found: dict[str, Value] = {}
    for variable, text in environment.items():
        if not variable.startswith(PREFIX) or variable in OF_THE_CLIENT:
            continue
        name = variable.removeprefix(PREFIX).lower()
        _require_known(name, names, shown=f"the variable {variable}")
        found[name] = _truth(text)
    return found


def _from_file(names: Collection[str], path: Path) -> dict[str, Value]:
    try:
        document = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"the configuration file {path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"the configuration file {path} is not TOML: {error}") from error
    table = document.pop("worker", {})
    if document or not isinstance(table, dict):
        strange = next(iter(document), "worker")
        raise ConfigError(f"{strange!r} in {path} is not a table of settings; put them under [worker]")
    found: dict[str, Value] = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        _require_known(name, names, shown=f"{key!r} in {path}")
        if not isinstance(value, str | int | float):
            raise ConfigError(f"{key!r} in {path} is {value!r}; give a number, a text, true or false")
        found[name] = value if isinstance(value, bool) else str(value)
    return found


def _require_known(name: str, names: Collection[str], *, shown: str) -> None:
    if name not in names:
        raise ConfigError(f"{shown} is no setting; there are {', '.join(sorted(names))}")


def _truth(text: str) -> Value:
    return {"true": True, "yes": True, "false": False, "no": False}.get(text.strip().lower(), text)


def as_flags(found: Mapping[str, Value]) -> list[str]:
    """The same settings as command-line flags; false is a flag that is not given.

    >>> as_flags({"l1_bytes": "2GB", "no_cache": True, "insecure": False})
    ['--l1-bytes=2GB', '--no-cache']
    """
    flags = []
    for name, value in found.items():
        flag = "--" + name.replace("_", "-")
        if value is not False:
            flags.append(flag if value is True else f"{flag}={value}")
    return flags
