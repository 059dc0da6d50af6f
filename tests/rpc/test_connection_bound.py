import resource
from collections.abc import Callable
from typing import TypeAlias

import pytest

from model_worker.rpc import connections

Limits: TypeAlias = tuple[int, int]
UNLIMITED = resource.RLIM_INFINITY


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> Callable[[Limits], list[Limits]]:
    """Pretends that the process has some limits; the list gets what is set."""

    def pretend(given: Limits) -> list[Limits]:
        was_set: list[Limits] = []
        monkeypatch.setattr(resource, "getrlimit", lambda _: given)
        monkeypatch.setattr(resource, "setrlimit", lambda _, wanted: was_set.append(wanted))
        return was_set

    return pretend


@pytest.mark.parametrize(
    ("soft", "most"), [(1024, 768), (10**6, 4096), (UNLIMITED, 4096), (256, 1), (20, 1), (4352, 4096)]
)
def test_connections_leave_files_for_the_rest(limits: Callable[[Limits], list[Limits]], soft: int, most: int) -> None:
    limits((soft, UNLIMITED))
    assert connections.most_connections() == most


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((1024, 4096), [(4096, 4096)]),
        ((1024, 10**6), [(8192, 10**6)]),
        ((1024, UNLIMITED), [(8192, UNLIMITED)]),
        ((1024, 1024), []),
        ((20_000, 20_000), []),
        ((UNLIMITED, UNLIMITED), []),
    ],
)
def test_the_limit_of_files_is_raised_as_far_as_needed_and_never_lowered(
    limits: Callable[[Limits], list[Limits]], given: Limits, expected: list[Limits]
) -> None:
    was_set = limits(given)
    connections.raise_file_limit()
    assert was_set == expected
