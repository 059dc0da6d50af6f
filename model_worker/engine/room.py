"""Whether the queue takes a request, and if not, when to try again."""

from model_worker.engine.ledger import Ledger
from model_worker.engine.scheduler import Scheduler
from prefixcache.errors import CapacityExceeded

UNKNOWN_SERVICE_S = 1.0
SHORTEST_RETRY_S = 0.05
LONGEST_RETRY_S = 60.0


def check_room(scheduler: Scheduler, ledger: Ledger, *, num_samples: int) -> None:
    """Count a refusal and raise CapacityExceeded where ``num_samples`` sequences do not fit into the queue now."""
    num_free = scheduler.num_free
    if num_samples <= num_free:
        return
    ledger.requests.refused += 1
    is_ever_possible = num_samples <= scheduler.num_places
    retry_after_s = estimate_retry_s(scheduler, ledger, num_places=num_samples - num_free) if is_ever_possible else None
    when = "later" if retry_after_s is None else f"in about {retry_after_s:.2g} s"
    if num_free > 0:
        happened = f"the queue has room for {num_free} of {num_samples} samples; ask for fewer,"
    else:
        happened = f"the queue is full: {scheduler.num_waiting} requests wait;"
    raise CapacityExceeded(f"{happened} try again {when} or raise --max-waiting", retry_after_s=retry_after_s)


def estimate_retry_s(scheduler: Scheduler, ledger: Ledger, *, num_places: int) -> float:
    """In how many seconds ``num_places`` places of the queue will be free.

    A place is free whenever a sequence ends, which one of ``n`` running ones does every ``n``-th part
    of what a recent one took from its slot to its end.
    """
    service_s = UNKNOWN_SERVICE_S if ledger.service_s is None else ledger.service_s
    estimate = service_s * num_places / max(len(scheduler.running), 1)
    return min(max(estimate, SHORTEST_RETRY_S), LONGEST_RETRY_S)
