import doctest

import pytest

import prefixcache.config
from prefixcache import ConfigError
from prefixcache.config import format_size, parse_size


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("0", 0),
        ("17", 17),
        ("17B", 17),
        ("1k", 1_000),
        ("1kB", 1_000),
        ("1KB", 1_000),
        ("1KiB", 1_024),
        ("100MB", 100_000_000),
        ("100 mb", 100_000_000),
        ("4GB", 4_000_000_000),
        ("2GiB", 2 * 2**30),
        ("2gi", 2 * 2**30),
        ("1.5GiB", 3 * 2**29),
        (" 1TB ", 10**12),
        ("0.1kB", 100),
        ("1.0005kB", 1_000),
        ("123456789012345678901", 123456789012345678901),
    ],
)
def test_a_size_is_read_exactly(text: str, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize(
    "text", ["", " ", "GB", "-1", "1e9", "1,5GB", "1XB", "1iB", "1 GB extra", "0x10", "٣", "1..5", ".5"]
)
def test_what_is_no_size_is_a_config_error_that_shows_it(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a size"):
        parse_size(text)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (999, "999 B"),
        (1_000, "1 kB"),
        (999_499, "999 kB"),
        (999_500, "1 MB"),
        (2**30, "1.07 GB"),
        (5 * 10**15, "5,000 TB"),
    ],
)
def test_a_size_is_shown_with_three_digits(num_bytes: int, text: str) -> None:
    assert format_size(num_bytes) == text


def test_the_examples_hold() -> None:
    assert doctest.testmod(prefixcache.config).failed == 0
