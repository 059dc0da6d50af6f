"""Settings as people write them: byte sizes such as ``4GB`` or ``512MiB``."""

import re
from typing import Final

from prefixcache.errors import ConfigError

_DECIMAL: Final = {"": 1, "b": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY: Final = {"k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_SIZE: Final = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<prefix>[kmgt]?)(?P<binary>i?)b?", re.ASCII | re.IGNORECASE)
_UNITS: Final = ("B", "kB", "MB", "GB", "TB")


def parse_size(text: str) -> int:
    """Bytes of a written size; ``kB MB GB TB`` are powers of 1000, ``KiB MiB GiB TiB`` of 1024.

    The unit's case and its final B do not matter; without a unit the number is
    bytes. A fraction of a byte is dropped. Raises ConfigError for anything else.

    >>> parse_size("4GB"), parse_size("1.5 MiB"), parse_size("0")
    (4000000000, 1572864, 0)
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or (match["binary"] and not match["prefix"]):
        raise ConfigError(f"{text!r} is not a size; write a number and a unit, such as 512MB, 4GB or 2GiB")
    factors = _BINARY if match["binary"] else _DECIMAL
    whole, _, fraction = match["number"].partition(".")
    scale: int = 10 ** len(fraction)
    return int(whole + fraction) * factors[match["prefix"].lower()] // scale


def format_size(num_bytes: int) -> str:
    """A size for people, in decimal units with three significant digits.

    >>> format_size(0), format_size(1_500_000), format_size(268_435_456)
    ('0 B', '1.5 MB', '268 MB')
    """
    amount = float(num_bytes)
    for unit in _UNITS:
        if amount < 999.5 or unit == _UNITS[-1]:
            return f"{amount:.3g} {unit}" if amount < 999.5 else f"{amount:,.0f} {unit}"
        amount /= 1000
    raise AssertionError("the last unit takes every amount")
