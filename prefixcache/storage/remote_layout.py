"""A call on one chain split by server: who has which of its blocks, under which keys.

A ``Part`` is made on the loop, worked on by one thread inside one transfer, and read
on the loop again when that has ended. Owner of ``Layout``: ``RemoteTier``.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Final, TypeAlias

from redis.exceptions import AskError, RedisClusterException, ResponseError, TryAgainError

from prefixcache.errors import TierUnavailable
from prefixcache.storage.remote_calls import FAULTS, CallRunner
from prefixcache.storage.remote_connection import Command, InPlace
from prefixcache.storage.remote_keys import MAX_EPOCH_BYTES, Epochs, KeySpace
from prefixcache.storage.remote_nodes import RELOAD_PAUSE_S, Node, Nodes
from prefixcache.storage.remote_wire import Deadline

logger = logging.getLogger(__name__)

WORD_OUTLIVES_BLOCKS_S: Final = 3_600.0
LONGEST_TTL_S: Final = 10 * 365 * 86_400.0

Clock: TypeAlias = Callable[[], float]
PartWork: TypeAlias = Callable[["Part", InPlace, Deadline], None]
GroupWork: TypeAlias = Callable[[InPlace, Deadline, Sequence[bytes]], None]


def ttl_ms(ttl_s: float) -> int:
    """Whole milliseconds a server takes, at least one."""
    return max(int(min(ttl_s, LONGEST_TTL_S) * 1_000), 1)


class Part:
    """The blocks of one call that one server has: ``places`` in the call's ``hashes``.

    ``results`` has one entry for each place, None until it is known, or an error; ``words`` the
    groups' words as far as they are known.
    """

    def __init__(self, node: Node, root: bytes, space: KeySpace) -> None:
        self.node = node
        self.places: list[int] = []
        self.hashes: list[bytes] = []
        self.results: list[object] = []
        self.words: dict[int, bytes] = {}
        self.words_asked: dict[int, bytes] = {}
        self._root = root
        self._space = space

    def add(self, place: int, block_hash: bytes) -> None:
        """Take in one block of the call."""
        self.places.append(place)
        self.hashes.append(block_hash)
        self.results.append(None)

    def find_keys(self, connection: InPlace, deadline: Deadline, *, absent: object) -> list[tuple[int, bytes]]:
        """Number in this part and key of each block that may be there; the others' result becomes ``absent``."""
        self._ask(connection, deadline, self._wordless())
        found = []
        for number, block_hash in enumerate(self.hashes):
            word = self.words.get(self._space.group_of(block_hash))
            if word is not None:
                found.append((number, self._space.block_key(self._root, word, block_hash)))
            elif self.results[number] is None:
                self.results[number] = absent
        return found

    def draw_words(self, connection: InPlace, deadline: Deadline, ttl_s: float) -> None:
        """Have each group's word as it is now, outliving blocks of ``ttl_s``; a new one where there is room for it."""
        self.words.clear()
        lifetime_ms = ttl_ms(ttl_s + WORD_OUTLIVES_BLOCKS_S)
        self._ask(connection, deadline, self._wordless(), lifetime_ms=lifetime_ms)
        wordless = self._wordless()
        drawn = [
            ("SET", self._space.epoch_key(self._root, group), secrets.token_hex(8), "NX", "PX", lifetime_ms)
            for group in wordless
        ]
        connection.call(drawn, deadline)
        self._ask(connection, deadline, wordless)

    def keep_words(self, connection: InPlace, deadline: Deadline, ttl_s: float) -> None:
        """Let the words known outlive blocks of ``ttl_s``."""
        keys = [self._space.epoch_key(self._root, group) for group in self.words]
        connection.call(_prolong(keys, ttl_ms(ttl_s + WORD_OUTLIVES_BLOCKS_S)), deadline)

    def fail(self, error: Exception) -> None:
        """Nothing more will come: what is not known is ``error``."""
        self.results = [error if result is None else result for result in self.results]

    def _wordless(self) -> list[int]:
        groups = dict.fromkeys(self._space.group_of(block_hash) for block_hash in self.hashes)
        return [group for group in groups if group not in self.words]

    def _ask(
        self, connection: InPlace, deadline: Deadline, groups: Sequence[int], *, lifetime_ms: int | None = None
    ) -> None:
        keys = [self._space.epoch_key(self._root, group) for group in groups]
        prolonged = _prolong(keys, lifetime_ms) if lifetime_ms else []
        asked: list[Command] = [("GETRANGE", key, 0, MAX_EPOCH_BYTES - 1) for key in keys]
        replies = connection.call([*prolonged, *asked], deadline)[len(prolonged) :]
        for group, reply in zip(groups, replies, strict=True):
            if isinstance(reply, bytes) and reply:
                self.words[group] = self.words_asked[group] = reply
            elif isinstance(reply, ResponseError):
                self._fail_group(group, reply)

    def _fail_group(self, group: int, error: ResponseError) -> None:
        for number, block_hash in enumerate(self.hashes):
            if self._space.group_of(block_hash) == group:
                self.results[number] = error


class Layout:
    """Splits calls over ``nodes`` and runs the parts; asks a cluster again where its keys are when that changed."""

    def __init__(self, nodes: Nodes, runner: CallRunner, *, prefix: str, clock: Clock) -> None:
        self.space = KeySpace(prefix, nodes.num_groups)
        self.epochs = Epochs(clock=clock)
        self._nodes = nodes
        self._runner = runner
        self._clock = clock
        self._loading: asyncio.Task[None] | None = None
        self._loaded_at = float("-inf")
        self._fault = ""
        self._is_closed = False

    async def run(self, root: bytes, hashes: Sequence[bytes], work: PartWork, deadline: Deadline) -> list[object]:
        """One result, or error, for each block. Raises TierUnavailable where all are errors.

        Ends when no part touches anything of the caller's any more.
        """
        await self.load(deadline)
        asked_at = self._clock()
        results: list[object] = [None] * len(hashes)
        parts = self._split(root, hashes, results)
        await self._run_parts(parts, work, deadline)
        for part in parts:
            for place, result in zip(part.places, part.results, strict=True):
                results[place] = result
            self.epochs.learn(root, part.words_asked, asked_at=asked_at)
        self._note_moves(results)
        errors = [result for result in results if isinstance(result, Exception)]
        if errors and len(errors) == len(results):
            raise errors[0] if isinstance(errors[0], TierUnavailable) else TierUnavailable(str(errors[0]))
        return results

    async def load(self, deadline: Deadline) -> None:
        """Know where keys are. Raises TierUnavailable."""
        if self._nodes.is_loaded:
            return
        self._reload()
        if self._loading is not None:
            try:
                await asyncio.wait((self._loading,), timeout=deadline.left_s())
            except TimeoutError:
                self._fault = "the call's deadline passed"
        if not self._nodes.is_loaded:
            raise TierUnavailable(f"the cluster's nodes are not known: {self._fault or 'none has answered yet'}")

    async def run_on_groups(self, root: bytes, work: GroupWork, deadline: Deadline) -> None:
        """Run ``work`` with the word keys of all groups of ``root``, by server. Raises TierUnavailable if one fails."""
        await self.load(deadline)
        shares: dict[str, tuple[Node, list[bytes]]] = {}
        for group in range(self.space.num_groups):
            key = self.space.epoch_key(root, group)
            node = self._node_of(key)
            shares.setdefault(node.name, (node, []))[1].append(key)
        for node, keys in shares.values():
            await self._runner.run(node, partial(_with_keys, work, keys), deadline_s=_left_s(deadline))

    async def close(self) -> None:
        """End what is running and close all connections."""
        self._is_closed = True
        await self._runner.close()
        if self._loading is not None:
            self._loading.cancel()
            await asyncio.wait((self._loading,))
        self._nodes.close()

    def _split(self, root: bytes, hashes: Sequence[bytes], results: list[object]) -> list[Part]:
        """The parts of a call, each in the chain's order; blocks no server has get their error in ``results``."""
        parts: dict[str, Part] = {}
        part_of: dict[int, Part | TierUnavailable] = {}
        for place, block_hash in enumerate(hashes):
            group = self.space.group_of(block_hash)
            if group not in part_of:
                part_of[group] = self._part_for(root, group, parts)
            part = part_of[group]
            if isinstance(part, Part):
                part.add(place, block_hash)
            else:
                results[place] = part
        return list(parts.values())

    def _part_for(self, root: bytes, group: int, parts: dict[str, Part]) -> Part | TierUnavailable:
        try:
            node = self._node_of(self.space.epoch_key(root, group))
        except TierUnavailable as error:
            return error
        part = parts.setdefault(node.name, Part(node, root, self.space))
        word = self.epochs.known(root, group)
        if word is not None:
            part.words[group] = word
        return part

    async def _run_parts(self, parts: Sequence[Part], work: PartWork, deadline: Deadline) -> None:
        if len(parts) == 1:
            await self._run_part(parts[0], work, deadline)
            return
        async with asyncio.TaskGroup() as group:
            for part in parts:
                group.create_task(self._run_part(part, work, deadline))

    async def _run_part(self, part: Part, work: PartWork, deadline: Deadline) -> None:
        try:
            await self._runner.run(part.node, partial(work, part), deadline_s=_left_s(deadline))
        except TierUnavailable as error:
            part.fail(error)
            self._reload()

    def _node_of(self, key: bytes) -> Node:
        try:
            return self._nodes.node_of(key)
        except RedisClusterException as error:
            raise TierUnavailable(f"no node of the cluster has the slot of a key: {error}") from error

    def _note_moves(self, results: Iterable[object]) -> None:
        if any(isinstance(result, AskError | TryAgainError) for result in results):
            self._reload()

    def _reload(self) -> None:
        """Ask where keys are in the background, not more often than once a second."""
        is_due = self._loading is None and self._clock() >= self._loaded_at + RELOAD_PAUSE_S
        if self._is_closed or not self._nodes.can_change or not is_due:
            return
        self._loading = asyncio.get_running_loop().create_task(self._load())

    async def _load(self) -> None:
        try:
            await self._runner.run_detached(self._nodes.load)
            self._fault = ""
        except FAULTS as error:
            self._fault = str(error)
            logger.warning("the cluster's nodes could not be asked for their slots: %s", error)
        except Exception as error:
            self._fault = f"an answer that cannot be understood: {error!r}"
            logger.exception("the cluster answered in a way that redis-py does not understand")
        finally:
            self._loaded_at = self._clock()
            self._loading = None


def _prolong(keys: Sequence[bytes], lifetime_ms: int) -> list[Command]:
    return [("PEXPIRE", key, lifetime_ms, "GT") for key in keys]


def _left_s(deadline: Deadline) -> float:
    try:
        return deadline.left_s()
    except TimeoutError as error:
        raise TierUnavailable("the call's deadline passed before the server was asked") from error


def _with_keys(work: GroupWork, keys: Sequence[bytes], connection: InPlace, deadline: Deadline) -> None:
    work(connection, deadline, keys)
