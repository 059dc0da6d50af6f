"""Random and mutated requests for hypothesis, made from the descriptors of the protos."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from google.protobuf.descriptor import FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st

from prefixcache.pb.v1 import admin_pb2, cache_pb2, worker_pb2

Draw = Callable[[st.SearchStrategy[Any]], Any]

METHODS: list[MethodDescriptor] = [
    method
    for file in (worker_pb2, cache_pb2, admin_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
]
GENERATE = worker_pb2.DESCRIPTOR.services_by_name["ModelWorker"].methods_by_name["Generate"]
MAX_ITEMS = 3

_WORDS = [
    "",
    "user",
    "tool",
    "x" * 300,
    "\0",
    "emoji 👩‍👩‍👧",
    "\u202eright to left",
    "{}",
    '{"a": 1}',
    "7.1",
    "r.1",
    "fake",
]
_TEXTS = st.sampled_from(_WORDS) | st.text(max_size=20)
_FLOATS = st.sampled_from([0.0, -0.0, 0.5, 1.0, 2.0, -2.0, math.inf, -math.inf, math.nan, 1e-30, 3e38]) | st.floats(
    width=32
)
_SMALL = st.integers(0, 300)


@dataclass(frozen=True)
class FuzzedCall:
    """A method's path and the bytes to send to it."""

    path: str
    is_stream: bool
    request: bytes


@st.composite
def fuzzed_calls(draw: Draw) -> FuzzedCall:
    """A call of any method, most often Generate, with a request that is good, nearly good, random or damaged."""
    method = draw(st.sampled_from([*METHODS, *[GENERATE] * len(METHODS)]))
    message: Any = GetMessageClass(method.input_type)()
    kind = draw(st.sampled_from(["good", "nearly good", "nearly good", "random", "damaged"]))
    if kind != "random":
        _make_good(draw, message)
    if kind != "good":
        _fill(draw, message, one_in=2 if kind == "random" else 8)
    request = message.SerializeToString()
    if kind == "damaged":
        request = _damaged(draw, request)
    return FuzzedCall(f"/{method.containing_service.full_name}/{method.name}", method.server_streaming, request)


def _make_good(draw: Draw, message: Any) -> None:
    names = message.DESCRIPTOR.fields_by_name
    if "prompt" in names:
        message.prompt.CopyFrom(draw(st.sampled_from(_good_prompts())))
    if "stopping" in names:
        message.stopping.max_new_tokens = draw(st.integers(1, 6))
    if "request_id" in names:
        message.request_id = "r.1"


def _good_prompts() -> list[worker_pb2.Prompt]:
    turns = [worker_pb2.ChatMessage(role="user", content="hi"), worker_pb2.ChatMessage(role="assistant")]
    return [
        worker_pb2.Prompt(text="once upon a time there was a block of tokens"),
        worker_pb2.Prompt(chat=worker_pb2.Chat(messages=turns)),
        worker_pb2.Prompt(tokens=worker_pb2.TokenIds(ids=range(40))),
    ]


def _fill(draw: Draw, message: Message, *, one_in: int) -> None:
    for field in message.DESCRIPTOR.fields:
        if draw(st.integers(1, one_in)) != one_in:
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            _fill_map(draw, message, field)
        elif field.is_repeated:
            _fill_list(draw, message, field, one_in=one_in)
        elif field.message_type is not None:
            _fill(draw, getattr(message, field.name), one_in=2)
        else:
            setattr(message, field.name, draw(_scalars(field)))


def _fill_map(draw: Draw, message: Message, field: Any) -> None:
    entry = field.message_type
    pairs = st.dictionaries(
        _scalars(entry.fields_by_name["key"]), _scalars(entry.fields_by_name["value"]), max_size=MAX_ITEMS
    )
    getattr(message, field.name).update(draw(pairs))


def _fill_list(draw: Draw, message: Message, field: Any, *, one_in: int) -> None:
    items = getattr(message, field.name)
    if field.message_type is None:
        items.extend(draw(st.lists(_scalars(field), max_size=MAX_ITEMS)))
        return
    for _ in range(draw(st.integers(0, MAX_ITEMS))):
        _fill(draw, items.add(), one_in=one_in)


def _scalars(field: Any) -> st.SearchStrategy[Any]:
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        return _TEXTS
    if field.cpp_type in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
        return _FLOATS
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return st.booleans()
    if field.cpp_type == FieldDescriptor.CPPTYPE_INT32:
        return st.integers(-100, 100) | st.sampled_from([-(2**31), -101, 101, 2**31 - 1])
    num_bits = 32 if field.cpp_type == FieldDescriptor.CPPTYPE_UINT32 else 64
    assert field.cpp_type in (FieldDescriptor.CPPTYPE_UINT32, FieldDescriptor.CPPTYPE_UINT64), field.full_name
    return _SMALL | st.sampled_from([0, 1, 2**31, 2**num_bits - 1]) | st.integers(0, 2**num_bits - 1)


def _damaged(draw: Draw, request: bytes) -> bytes:
    damaged = bytearray(request)
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, len(damaged)))
        if draw(st.booleans()):
            damaged[place:place] = draw(st.binary(min_size=1, max_size=3))
        else:
            del damaged[place : place + draw(st.integers(1, 3))]
    return bytes(damaged)
