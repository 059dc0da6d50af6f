import random
from itertools import islice, pairwise, repeat
from statistics import fmean, pstdev

from prefixcache.load.arrivals import poisson_arrivals
from prefixcache.load.conversation import Planned, Request, single


def times(rate: float, *, seed: int, number: int) -> list[float]:
    planned = repeat(Planned(0.0, single(Request("hi", 1))))
    return [each.at_s for each in islice(poisson_arrivals(planned, rate=rate, rng=random.Random(seed)), number)]


def test_gaps_have_the_mean_and_spread_of_a_poisson_process() -> None:
    gaps = [later - earlier for earlier, later in pairwise(times(4.0, seed=1, number=20_000))]
    assert abs(fmean(gaps) - 0.25) < 0.01
    assert abs(pstdev(gaps) - 0.25) < 0.01


def test_arrivals_never_go_back_in_time() -> None:
    arrivals = times(100.0, seed=2, number=1_000)
    assert arrivals == sorted(arrivals)


def test_equal_seeds_give_equal_arrivals() -> None:
    assert times(2.0, seed=3, number=10) == times(2.0, seed=3, number=10) != times(2.0, seed=4, number=10)
