import pytest

from model_worker.engine.collector import (
    ITERATIONS_BETWEEN_COLLECTIONS,
    LONGEST_BETWEEN_COLLECTIONS_S,
    Collector,
)


class Watched:
    """A collector on a clock that is set by hand, and how often it collected."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.num_collections = 0
        self.collector = Collector(clock=lambda: self.now_s, collect=self.collect)

    def collect(self) -> None:
        self.num_collections += 1


@pytest.fixture
def watched() -> Watched:
    return Watched()


def test_an_idle_engine_collects_once_it_has_worked(watched: Watched) -> None:
    watched.collector.rest(ITERATIONS_BETWEEN_COLLECTIONS - 1)
    assert watched.num_collections == 0
    for _ in range(3):
        watched.collector.rest(ITERATIONS_BETWEEN_COLLECTIONS)
    assert watched.num_collections == 1


def test_an_engine_that_never_rests_collects_seldom(watched: Watched) -> None:
    for _ in range(100):
        watched.now_s += LONGEST_BETWEEN_COLLECTIONS_S / 40
        watched.collector.work()
    assert watched.num_collections == 2


def test_a_collection_in_an_idle_moment_puts_the_next_off(watched: Watched) -> None:
    watched.now_s = LONGEST_BETWEEN_COLLECTIONS_S - 1
    watched.collector.rest(ITERATIONS_BETWEEN_COLLECTIONS)
    watched.now_s += 2
    watched.collector.work()
    assert watched.num_collections == 1
