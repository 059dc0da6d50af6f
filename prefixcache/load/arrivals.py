"""When conversations begin in an open loop: at random, independent of what the worker does."""

import random
from collections.abc import Iterable, Iterator
from dataclasses import replace

from prefixcache.load.conversation import Planned


def poisson_arrivals(planned: Iterable[Planned], *, rate: float, rng: random.Random) -> Iterator[Planned]:
    """Give conversations the times of a Poisson process of ``rate`` a second; the first comes after one gap."""
    at_s = 0.0
    for each in planned:
        at_s += rng.expovariate(rate)
        yield replace(each, at_s=at_s)
