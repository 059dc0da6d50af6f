"""Values that are not what was written: the block is computed, the answer is as ever, and the value is replaced."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import redis

from prefixcache.core.blocks import HASH_BYTES
from prefixcache.storage.payload import encode
from prefixcache.storage.tensors import TensorSpec
from tests.engine.conftest import StartOn
from tests.engine.driver import BLOCK_SIZE, Answer, Driver
from tests.engine.tiers import NUM_BLOCKS, Crowd, chain_of, empty_memory, patient, written
from tests.fakes.valkey import Valkey
from tests.storage.payload_samples import forge, record_of

PLACE = 5
HUGE_BYTES = 600_000_000
NUM_OFFSETS = 12

pytestmark = pytest.mark.usefixtures("always_asks")


@pytest.fixture
def client(server: Valkey) -> Iterator[redis.Redis]:
    with server.client() as client:
        yield client


@dataclass(frozen=True)
class Stored:
    """The values of a prompt's blocks in the server, and the worker that wrote them."""

    client: redis.Redis
    writer: Driver
    crowd: Crowd
    keys: list[bytes]
    values: list[bytes]

    @property
    def prompt(self) -> list[int]:
        return self.crowd.prompts[0]

    async def check_is_computed_and_replaced(self, asked: Driver) -> Answer:
        """Ask a worker that has nothing in memory; the blocks before the bad one are fetched, the rest computed."""
        await empty_memory(asked)
        answer = await asked.answer(self.prompt)
        await written(asked)
        assert answer.token_ids == self.crowd.token_ids[0]
        assert answer.record.fetched_tokens_by_tier == {"redis": PLACE * BLOCK_SIZE}
        assert self.client.get(self.keys[PLACE]) == self.values[PLACE]
        return answer


def value_of(client: redis.Redis, key: bytes) -> bytes:
    value = client.get(key)
    assert isinstance(value, bytes)
    return value


@pytest.fixture
async def stored(start_on: StartOn, server: Valkey, client: redis.Redis, crowd: Crowd) -> Stored:
    writer = await start_on(redis=patient(server.url))
    await crowd.fill(writer)
    found: list[Any] = client.keys("*")
    by_hash = {key[-2 * HASH_BYTES :]: key for key in found}
    keys = [by_hash[block_hash.hex().encode()] for block_hash in chain_of(writer, crowd.prompts[0]).hashes]
    return Stored(client, writer, crowd, keys, [value_of(client, key) for key in keys])


@pytest.fixture
async def reader(start_on: StartOn, server: Valkey) -> Driver:
    """A worker that has written nothing."""
    return await start_on(redis=patient(server.url))


def shorter(stored: Stored) -> bytes:
    return stored.values[PLACE][:-1]


def nothing_but_the_preamble(stored: Stored) -> bytes:
    return stored.values[PLACE][:40]


def longer(stored: Stored) -> bytes:
    return stored.values[PLACE] + b"\0"


def zeros(stored: Stored) -> bytes:
    return bytes(len(stored.values[PLACE]))


def another_blocks(stored: Stored) -> bytes:
    return stored.values[PLACE - 1]


def of_another_dtype(stored: Stored) -> bytes:
    """As many bytes that say to be of another type."""
    return forged(stored, dtype="int32")


def of_half_the_dtype(stored: Stored) -> bytes:
    header = chain_of(stored.writer, stored.prompt).header(PLACE)
    specs = tuple(replace(spec, dtype="bfloat16") for spec in header.tensors)
    halved = replace(header, tensors=specs)
    return encode(halved, bytes(halved.body_bytes))


def of_an_older_version(stored: Stored) -> bytes:
    return forged(stored, version=0)


def of_another_namespace(stored: Stored) -> bytes:
    return forged(stored, namespace=bytes(HASH_BYTES))


def forged(stored: Stored, *, version: int = 1, dtype: str = "float32", namespace: bytes | None = None) -> bytes:
    """A value under a right checksum."""
    header = chain_of(stored.writer, stored.prompt).header(PLACE)
    specs: tuple[TensorSpec, ...] = tuple(replace(spec, dtype=dtype) for spec in header.tensors)
    record: dict[str, Any] = record_of(replace(header, tensors=specs, namespace=namespace or header.namespace))
    return forge(record, stored.values[PLACE][-header.body_bytes :], version=version)


@pytest.mark.parametrize(
    "spoil",
    [
        shorter,
        nothing_but_the_preamble,
        longer,
        zeros,
        another_blocks,
        of_another_dtype,
        of_half_the_dtype,
        of_an_older_version,
        of_another_namespace,
    ],
    ids=lambda spoil: spoil.__name__,
)
async def test_a_value_that_is_not_the_block_is_computed_and_replaced(
    stored: Stored, reader: Driver, spoil: Callable[[Stored], bytes]
) -> None:
    for asked in (reader, stored.writer):
        spoilt = spoil(stored)
        assert spoilt != stored.values[PLACE]
        stored.client.set(stored.keys[PLACE], spoilt, keepttl=True)
        await stored.check_is_computed_and_replaced(asked)


async def test_the_value_of_another_tenants_same_tokens_is_not_taken(stored: Stored, reader: Driver) -> None:
    await stored.writer.answer(stored.prompt, cache_salt="another")
    await written(stored.writer)
    theirs = chain_of(stored.writer, stored.prompt, cache_salt="another").hashes[PLACE].hex().encode()
    (key,) = list[Any](stored.client.keys(b"*" + theirs))
    stored.client.set(stored.keys[PLACE], value_of(stored.client, key), keepttl=True)
    await stored.check_is_computed_and_replaced(reader)


async def test_a_flipped_bit_in_any_field_of_the_header_is_found(stored: Stored) -> None:
    header = chain_of(stored.writer, stored.prompt).header(PLACE)
    whole = stored.values[PLACE]
    fields = {"magic": 0, "version": 8, "header bytes": 12, "body bytes": 16, "checksum": 24, "map": 40}
    for content in (header.namespace, header.parent_hash, header.block_hash, header.tokens, b"kv", b"float32"):
        fields[repr(content)] = whole.index(content, 40)
    fields["padding"] = len(whole) - header.body_bytes - 1
    for offset in fields.values():
        await check_a_flipped_bit(stored, offset)


async def test_a_flipped_bit_anywhere_in_the_body_is_found(stored: Stored) -> None:
    num_bytes = len(stored.values[PLACE])
    body_bytes = chain_of(stored.writer, stored.prompt).header(PLACE).body_bytes
    draw = random.Random(11)
    offsets = [draw.randrange(num_bytes - body_bytes, num_bytes) for _ in range(NUM_OFFSETS)]
    for offset in [num_bytes - body_bytes, *offsets, num_bytes - 1]:
        await check_a_flipped_bit(stored, offset)


async def check_a_flipped_bit(stored: Stored, offset: int) -> None:
    spoilt = bytearray(stored.values[PLACE])
    spoilt[offset] ^= 1 << offset % 8
    stored.client.set(stored.keys[PLACE], bytes(spoilt), keepttl=True)
    await stored.check_is_computed_and_replaced(stored.writer)


async def test_every_value_spoilt_costs_every_block_and_nothing_else(stored: Stored, reader: Driver) -> None:
    for key, value in zip(stored.keys, stored.values, strict=True):
        stored.client.set(key, value[::-1], keepttl=True)
    answer = await reader.answer(stored.prompt)
    await written(reader)
    assert answer.token_ids == stored.crowd.token_ids[0]
    assert answer.record.fetch_outcome == "failed"
    assert [stored.client.get(key) for key in stored.keys] == stored.values


async def test_a_value_of_600_mb_is_not_fetched_and_replaced(stored: Stored, reader: Driver) -> None:
    stored.client.config_set("proto-max-bulk-len", 2 * HUGE_BYTES)
    stored.client.setrange(stored.keys[PLACE], HUGE_BYTES - 1, b"x")
    sent_before = stored.client.info("stats")["total_net_output_bytes"]
    await stored.check_is_computed_and_replaced(reader)
    sent = stored.client.info("stats")["total_net_output_bytes"] - sent_before
    assert sent < 4 * NUM_BLOCKS * len(stored.values[PLACE])
