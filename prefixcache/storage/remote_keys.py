"""Names of what is stored remotely, and the epochs that make a whole root unreachable at once.

    <prefix>:{<root>.<group>}:epoch             a random word; without it nothing of the group is there
    <prefix>:{<root>.<group>}:<word>:<block>    one block

Clearing a root removes its words, which a full server allows; the next writer draws new ones. The braces
put a group and its word on one node of a cluster, so that a lost node costs its own blocks only.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

EPOCH_LIFE_S: Final = 1.0
MAX_EPOCH_BYTES: Final = 64
MAX_KNOWN_EPOCHS: Final = 100_000
NUM_CLUSTER_GROUPS: Final = 256


@dataclass(frozen=True, slots=True)
class KeySpace:
    """Keys under ``prefix``; a root's blocks fall into ``num_groups`` groups (1 to 256) by their hash."""

    prefix: str
    num_groups: int = 1

    def group_of(self, block_hash: bytes) -> int:
        """The group of a block."""
        return block_hash[0] % self.num_groups

    def epoch_key(self, root: bytes, group: int) -> bytes:
        """Where the word of a group is."""
        return self._of_group(root, group) + b"epoch"

    def block_key(self, root: bytes, word: bytes, block_hash: bytes) -> bytes:
        """Where a block is while its group's word is ``word``."""
        return b"%b%b:%b" % (self._of_group(root, self.group_of(block_hash)), word, block_hash.hex().encode())

    def _of_group(self, root: bytes, group: int) -> bytes:
        return f"{self.prefix}:{{{root.hex()}.{group}}}:".encode()


class Epochs:
    """Words read within the last second, by root and group. Owner: one event loop."""

    def __init__(self, *, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._words: OrderedDict[tuple[bytes, int], tuple[bytes, float]] = OrderedDict()
        self._cleared_at = float("-inf")

    def known(self, root: bytes, group: int) -> bytes | None:
        """The group's word, if it was read less than a second ago."""
        word, read_at = self._words.get((root, group), (None, 0.0))
        return word if self._clock() < read_at + EPOCH_LIFE_S else None

    def learn(self, root: bytes, words: Mapping[int, bytes], *, asked_at: float) -> None:
        """Take in words that were asked for at ``asked_at``, unless something was cleared since."""
        if asked_at <= self._cleared_at:
            return
        for group, word in words.items():
            self._words[root, group] = (word, asked_at)
            self._words.move_to_end((root, group))
        while len(self._words) > MAX_KNOWN_EPOCHS:
            self._words.popitem(last=False)

    def forget_all(self) -> None:
        """A root was cleared: every word is asked for again, also those under way."""
        self._cleared_at = self._clock()
        self._words.clear()
