import dataclasses
import tracemalloc

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixcache.errors import CorruptBlock, InvalidRequest, NamespaceMismatch
from prefixcache.storage.payload import (
    MAX_HEADER_BYTES,
    BadPayload,
    PayloadFault,
    PayloadHeader,
    encode,
    encode_parts,
    prefix_bytes,
    verify,
    verify_parts,
)
from prefixcache.storage.tensors import MAX_BODY_BYTES, lay_out
from tests.storage.payload_samples import ALL_DTYPES, NAMESPACE, body_for, forge, header_for, record_of

HEADER = header_for()
BODY = body_for(HEADER)
PAYLOAD = encode(HEADER, BODY)
GOLDEN = (
    "504658424c4f434b01000000c10000007000000000000000839c9f7a1aebded166ad0161f88a162e85a96e616d657370616365c420000102"
    "030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1fa6706172656e74c420202122232425262728292a2b2c2d2e2f3031"
    "32333435363738393a3b3c3d3e3fa468617368c42072eaa153df1d7e446c92858d543b58ca0748cce4e8713be1783cbf4503800e38a6746f"
    "6b656e73c41001000000020000000300000004000000a774656e736f72739294a16ba862666c6f61743136930204030094a176a862666c6f"
    "6174313693020403400000000000000000000000000000000000000000000000030a11181f262d343b424950575e656c737a81888f969da4"
    "abb2b9c0c7ced5dce3eaf1f8ff060d141b222930373e454c535a61686f767d848b9299a0a7aeb5bcc3cad1d8dfe6edf4fb020910171e252c"
    "333a41484f565d646b727980878e959ca3aab1b8bfc6cdd4dbe2e9f0f7fe050c"
)


def reason_of(payload: bytes, *, expected: PayloadHeader = HEADER) -> PayloadFault:
    with pytest.raises(BadPayload) as caught:
        verify(payload, expected=expected)
    assert caught.value.reason.value in str(caught.value) or caught.value.reason is PayloadFault.HEADER
    return caught.value.reason


@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_round_trip(dtype: str) -> None:
    header = header_for(dtype)
    assert verify(encode(header, body_for(header)), expected=header) == body_for(header)


def test_bytes_of_the_format_are_fixed() -> None:
    assert PAYLOAD.hex() == GOLDEN


def test_encoder_agrees_with_an_independent_writer() -> None:
    assert forge(record_of(HEADER), BODY) == PAYLOAD


def test_parts_hold_the_callers_body_and_not_a_copy() -> None:
    body = bytearray(BODY)
    _, part = encode_parts(HEADER, body)
    assert isinstance(part, memoryview)
    assert part.obj is body


def test_a_body_in_pieces_makes_the_same_payload() -> None:
    assert encode(HEADER, BODY[:5], bytearray(BODY[5:40]), memoryview(BODY)[40:]) == PAYLOAD


def test_verify_gives_a_view_into_the_payload() -> None:
    payload = bytearray(PAYLOAD)
    assert verify(payload, expected=HEADER).obj is payload


def test_body_starts_aligned_where_prefix_bytes_says() -> None:
    assert prefix_bytes(HEADER) % 64 == 0
    assert PAYLOAD[prefix_bytes(HEADER) :] == BODY


def test_prefix_and_body_in_separate_buffers() -> None:
    start = prefix_bytes(HEADER)
    cell = bytearray(PAYLOAD[start:])
    verify_parts(PAYLOAD[:start], cell, expected=HEADER)
    cell[0] ^= 1
    with pytest.raises(BadPayload):
        verify_parts(PAYLOAD[:start], cell, expected=HEADER)


@pytest.mark.parametrize("body", [BODY[:-1], BODY + b"\0", b""])
def test_parts_of_other_lengths_are_refused(body: bytes) -> None:
    with pytest.raises(BadPayload) as caught:
        verify_parts(PAYLOAD[: prefix_bytes(HEADER)], body, expected=HEADER)
    assert caught.value.reason is PayloadFault.LENGTH


@pytest.mark.parametrize("length", range(len(PAYLOAD)))
def test_every_truncation_is_refused(length: int) -> None:
    assert reason_of(PAYLOAD[:length]) is PayloadFault.LENGTH


def test_trailing_bytes_are_refused() -> None:
    assert reason_of(PAYLOAD + b"\0") is PayloadFault.LENGTH


@given(st.sets(st.integers(0, len(PAYLOAD) * 8 - 1), min_size=1, max_size=4))
def test_flipped_bits_are_refused(bits: set[int]) -> None:
    payload = bytearray(PAYLOAD)
    for bit in bits:
        payload[bit // 8] ^= 1 << bit % 8
    with pytest.raises(BadPayload):
        verify(payload, expected=HEADER)


def test_every_flipped_byte_behind_the_lengths_is_a_checksum_fault() -> None:
    for position in range(24, len(PAYLOAD)):
        payload = bytearray(PAYLOAD)
        payload[position] ^= 0xFF
        assert reason_of(bytes(payload)) is PayloadFault.CHECKSUM


@given(st.binary(max_size=300))
def test_arbitrary_bytes_are_refused(noise: bytes) -> None:
    for payload in (noise, PAYLOAD[:8] + noise, forge(noise, BODY)):
        with pytest.raises(BadPayload):
            verify(payload, expected=HEADER)


def test_only_a_checksum_fault_lets_a_reader_delete() -> None:
    assert [fault for fault in PayloadFault if fault.is_deletable] == [PayloadFault.CHECKSUM]


def test_errors_are_those_of_the_package() -> None:
    assert issubclass(BadPayload, CorruptBlock)


@pytest.mark.parametrize("version", [0, 2, 2**32 - 1])
def test_another_version_is_refused_whatever_else_it_holds(version: int) -> None:
    assert reason_of(forge(b"some later header", b"", version=version)) is PayloadFault.VERSION


def test_another_magic_is_refused() -> None:
    assert reason_of(forge(record_of(HEADER), BODY, magic=b"PFXBLOCX")) is PayloadFault.MAGIC


@pytest.mark.parametrize(("header_length", "body_length"), [(40, 600 * 2**20), (2**32 - 1, 10), (40, 2**64 - 1)])
def test_stated_lengths_out_of_bounds_allocate_nothing(header_length: int, body_length: int) -> None:
    payload = bytearray(PAYLOAD)
    payload[12:24] = header_length.to_bytes(4, "little") + body_length.to_bytes(8, "little")
    tracemalloc.start()
    assert reason_of(bytes(payload)) is PayloadFault.LENGTH
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()


def test_an_intact_payload_of_another_namespace_is_a_namespace_mismatch() -> None:
    other = header_for(namespace=bytes(32))
    with pytest.raises(NamespaceMismatch, match=NAMESPACE.hex()):
        verify(PAYLOAD, expected=other)


@pytest.mark.parametrize("other", [header_for(tokens=(1, 2, 3, 5)), header_for(parent=bytes(32))])
def test_the_payload_of_another_block_is_refused(other: PayloadHeader) -> None:
    assert reason_of(encode(other, BODY)) is PayloadFault.BLOCK_HASH


CHANGED_FIELDS: list[tuple[str, object, PayloadFault]] = [
    ("parent", bytes(32), PayloadFault.BLOCK_HASH),
    ("hash", bytes(32), PayloadFault.BLOCK_HASH),
    ("tokens", HEADER.tokens[::-1], PayloadFault.TOKENS),
    ("tensors", [["q", "bfloat16", [2, 4, 3], 0], ["v", "bfloat16", [2, 4, 3], 64]], PayloadFault.TENSORS),
    ("tensors", [["k", "float16", [2, 4, 3], 0], ["v", "bfloat16", [2, 4, 3], 64]], PayloadFault.TENSORS),
    ("tensors", [["k", "bfloat16", [4, 2, 3], 0], ["v", "bfloat16", [2, 4, 3], 64]], PayloadFault.TENSORS),
    ("tensors", [["k", "bfloat16", [2, 4, 3], 0], ["v", "bfloat16", [2, 4, 3], 128]], PayloadFault.TENSORS),
    ("tensors", [["v", "bfloat16", [2, 4, 3], 64]], PayloadFault.TENSORS),
]


@pytest.mark.parametrize(("field", "value", "reason"), CHANGED_FIELDS)
def test_a_changed_field_under_a_right_checksum_is_refused(field: str, value: object, reason: PayloadFault) -> None:
    assert reason_of(forge({**record_of(HEADER), field: value}, BODY)) is reason


def test_a_block_hash_that_its_parent_and_tokens_do_not_give_is_refused_even_if_expected() -> None:
    invented = dataclasses.replace(HEADER, block_hash=bytes(32))
    assert reason_of(forge(record_of(invented), BODY), expected=invented) is PayloadFault.BLOCK_HASH


MALFORMED_FIELDS: list[tuple[str, object]] = [
    *(
        (name, value)
        for name in ("namespace", "parent", "hash", "tokens")
        for value in (b"", b"short", "text", 7, None)
    ),
    ("tokens", bytes(4 * 65_537)),
    ("tensors", []),
    ("tensors", b"no list"),
    ("tensors", [["k", "bfloat16", [1], 0]] * 4097),
    ("tensors", [["k", "bfloat16", [1], 64], ["v", "bfloat16", [1], 0]]),
    ("tensors", [["k", "bfloat16", [1], 0], ["v", "bfloat16", [1], 0]]),
    *(
        ("tensors", [tensor])
        for tensor in (7, ["k"], [7, "bfloat16", [1], 0], ["k", 7, [1], 0], ["k", "bfloat16", 1, 0])
    ),
    *(("tensors", [["k", dtype, [1], 0]]) for dtype in ("", "float", "complex64")),
    *(("tensors", [["k", "bfloat16", shape, 0]]) for shape in ([], [0], [-1], [True], [1.0], [2**40], [1] * 9)),
    *(("tensors", [["k", "bfloat16", [1], offset]]) for offset in (-64, 1, True, 2**62)),
    *(("tensors", [[name, "bfloat16", [1], 0]]) for name in ("", "k" * 129, "\u00e9")),
]


@pytest.mark.parametrize(("field", "value"), MALFORMED_FIELDS)
def test_a_malformed_field_under_a_right_checksum_is_refused(field: str, value: object) -> None:
    assert reason_of(forge({**record_of(HEADER), field: value}, BODY)) is PayloadFault.HEADER


@pytest.mark.parametrize("field", list(record_of(HEADER)))
def test_a_missing_field_is_refused(field: str) -> None:
    record = record_of(HEADER)
    del record[field]
    assert reason_of(forge(record, BODY)) is PayloadFault.HEADER


@pytest.mark.parametrize(
    "header",
    [
        msgpack.packb({**record_of(HEADER), "more": 1}),
        msgpack.packb(list(record_of(HEADER).values())),
        msgpack.packb(record_of(HEADER)) + b"\0",
        b"\x91" * 5000,
        b"\xdd\xff\xff\xff\xff",
        b"\xd6\xff\xff\xff\xff\xff",
        b"\xa1\xff",
        b"",
    ],
)
def test_a_header_that_is_no_such_map_is_refused(header: bytes) -> None:
    assert reason_of(forge(header, BODY)) is PayloadFault.HEADER


def test_encode_refuses_a_body_of_another_length() -> None:
    with pytest.raises(InvalidRequest, match=str(HEADER.body_bytes)):
        encode(HEADER, BODY[:-1])


def test_encode_refuses_a_hash_that_is_not_the_blocks() -> None:
    with pytest.raises(InvalidRequest, match="block hash"):
        encode(dataclasses.replace(HEADER, block_hash=bytes(32)), BODY)


@pytest.mark.parametrize(
    "change",
    [{"namespace": b""}, {"parent_hash": bytes(31)}, {"block_hash": bytes(33)}, {"tokens": b"abc"}, {"tensors": ()}],
)
def test_a_header_out_of_bounds_cannot_be_made(change: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest, match=next(iter(change))):
        dataclasses.replace(HEADER, **change)  # type: ignore[arg-type]


def test_the_largest_header_stays_within_its_bound() -> None:
    tensors = [(f"{i:0128d}", "float8_e4m3fn", (128, 1024, *(1,) * 6)) for i in range(4096)]
    header = header_for(tokens=range(65_536))
    header = dataclasses.replace(header, tensors=lay_out(tensors))
    assert header.body_bytes == MAX_BODY_BYTES
    assert prefix_bytes(header) <= MAX_HEADER_BYTES
