"""When the tokens of requests that were sent together arrived, and the rates and latencies in that."""

import statistics
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Timeline:
    """For each request the moment of each of its tokens; seconds from the sending, which is one moment for all."""

    arrivals_s: list[list[float]]

    @property
    def num_requests(self) -> int:
        """Requests."""
        return len(self.arrivals_s)

    @property
    def num_tokens(self) -> int:
        """Tokens of a request, the same for all."""
        (number,) = {len(times) for times in self.arrivals_s}
        return number

    @property
    def end_s(self) -> float:
        """The last token's moment."""
        return max(times[-1] for times in self.arrivals_s)

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all requests over the time from the sending to the last token."""
        return self.num_requests * self.num_tokens / self.end_s

    @property
    def ttfts_s(self) -> list[float]:
        """Times to first token."""
        return [times[0] for times in self.arrivals_s]

    @property
    def tpots_s(self) -> list[float]:
        """Mean times between tokens, one for each request of two tokens and more."""
        return [(times[-1] - times[0]) / (len(times) - 1) for times in self.arrivals_s if len(times) > 1]

    @property
    def crowded_tokens_per_s(self) -> float:
        """Tokens a second while all requests decode: from the last first token to the first last token."""
        begin, end = max(self.ttfts_s), min(times[-1] for times in self.arrivals_s)
        assert begin < end, f"the last request began at {begin:.3f} s, another had ended at {end:.3f} s"
        return sum(begin < at_s <= end for times in self.arrivals_s for at_s in times) / (end - begin)

    def tokens_per_s_of(self, num_tokens: int) -> float:
        """``tokens_per_s`` had each request as many tokens, the missing ones at the pace of the last to begin.

        That one ends last, so its pace is what the others are waiting for; its median gap is taken.
        """
        missing = num_tokens - self.num_tokens
        if missing == 0:
            return self.tokens_per_s
        last = max(self.arrivals_s, key=lambda times: times[0])
        gap_s = statistics.median(later - earlier for earlier, later in pairwise(last))
        return self.num_requests * num_tokens / (self.end_s + missing * gap_s)
