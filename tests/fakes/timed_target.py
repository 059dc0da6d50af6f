"""A target that takes as long as it is told, on a virtual clock."""

from collections.abc import Callable
from dataclasses import dataclass, field

from prefixcache.errors import CapacityExceeded
from prefixcache.load.conversation import Answer, Request
from tests.fakes.virtual_clock import VirtualClock


@dataclass
class TimedTarget:
    """First token after ``first_s``, each further one after ``next_s``; refuses beyond ``max_running``."""

    clock: VirtualClock
    first_s: float = 1.0
    next_s: float = 0.1
    max_running: int = 1_000
    blocks_s: float = 0.0
    requests: list[Request] = field(default_factory=list)
    num_running: int = 0
    most_running: int = 0

    async def send(self, request: Request, on_tokens: Callable[[int], None]) -> Answer:
        self.requests.append(request)
        self.clock.block(self.blocks_s)
        if self.num_running >= self.max_running:
            raise CapacityExceeded(f"{self.max_running} requests are running")
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            await self.clock.sleep(self.first_s)
            for number in range(request.max_new_tokens):
                if number:
                    await self.clock.sleep(self.next_s)
                on_tokens(1)
        finally:
            self.num_running -= 1
        ids = tuple(range(900, 900 + request.max_new_tokens))
        return Answer(ids, "said", prompt_tokens=len(request.prompt), cached_prompt_tokens=0)
