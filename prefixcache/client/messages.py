"""Between the client's plain values and the messages on the wire, both ways."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from types import UnionType
from typing import Any, Final, TypeVar, get_args, get_origin, get_type_hints

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message as WireMessage

from prefixcache.client.options import GenerateSettings
from prefixcache.client.types import (
    Chunk,
    FinishReason,
    Generation,
    Prompt,
    Sample,
    Timings,
    TokenLogprobs,
    Tool,
    Usage,
)
from prefixcache.errors import InvalidRequest
from prefixcache.pb.v1 import worker_pb2 as pb

_Value = TypeVar("_Value")

_SAMPLING_FIELDS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)

_TAKEN: Final[dict[int, str]] = {
    FieldDescriptor.TYPE_STRING: "valid Unicode text",
    FieldDescriptor.TYPE_INT32: "whole numbers from -2147483648 to 2147483647",
    FieldDescriptor.TYPE_UINT32: "whole numbers from 0 to 4294967295",
    FieldDescriptor.TYPE_UINT64: "whole numbers from 0 to 18446744073709551615",
    FieldDescriptor.TYPE_FLOAT: "a number",
    FieldDescriptor.TYPE_BOOL: "True or False",
}

_REASONS: dict[int, FinishReason] = {
    pb.FINISH_REASON_EOS: "eos",
    pb.FINISH_REASON_STOP_TEXT: "stop_text",
    pb.FINISH_REASON_STOP_TOKEN: "stop_token",
    pb.FINISH_REASON_LENGTH: "length",
}


def generate_request(prompt: Prompt, settings: GenerateSettings) -> pb.GenerateRequest:
    """Build the request; a value that cannot be sent is an InvalidRequest naming its field."""
    request = pb.GenerateRequest(prompt=wire_prompt(prompt, tools=settings.tools))
    _set_sampling(request.sampling, settings)
    if settings.max_new_tokens is not None:
        set_field(request.stopping, "max_new_tokens", settings.max_new_tokens)
    set_field(request.stopping, "min_new_tokens", settings.min_new_tokens)
    set_field(request.stopping, "ignore_eos", settings.ignore_eos)
    _extend(request.stopping, "stop", settings.stop_texts)
    _extend(request.stopping, "stop_token_ids", settings.stop_token_ids)
    set_field(request, "cache_salt", settings.cache_salt)
    set_field(request, "bypass_prefix_cache", settings.bypass_prefix_cache)
    set_field(request, "priority", settings.priority)
    request.report_progress = settings.on_progress is not None
    set_field(request, "model", settings.model)
    return request


def wire_prompt(prompt: Prompt, *, tools: Sequence[Tool] = ()) -> pb.Prompt:
    """Build the prompt: a string is text, a list of dicts a chat, which may have tools, a list of ints token ids."""
    message = _input(prompt)
    if tools:
        if not message.HasField("chat"):
            raise InvalidRequest("tools need a chat; give the prompt as a list of messages")
        _extend(message.chat, "tools", [_tool_text(tool, place) for place, tool in enumerate(tools)])
    return message


def _input(prompt: Prompt) -> pb.Prompt:
    if isinstance(prompt, str):
        return _text_prompt(prompt)
    if isinstance(prompt, (bytes, Mapping)) or not isinstance(prompt, Iterable):
        raise InvalidRequest(
            f"prompt is a {type(prompt).__name__}; give a string, a list of token ids or a list of messages"
        )
    items = list(prompt)
    if not items:
        raise InvalidRequest("prompt is an empty list; give at least one token id or message")
    return _chat_prompt(items) if isinstance(items[0], Mapping) else _token_prompt(items)


def read(kind: type[_Value], message: WireMessage) -> _Value:
    """Make a result of the dataclass ``kind`` from the message fields of the same names."""
    hints = get_type_hints(kind)
    assert is_dataclass(kind)
    return kind(**{field.name: _field(hints[field.name], message, field.name) for field in fields(kind)})


def chunk(tokens: pb.Tokens) -> Chunk:
    """Make a piece of the answer."""
    logprobs = (
        TokenLogprobs(at_token.logprob, tuple((top.id, top.logprob) for top in at_token.top))
        for at_token in tokens.logprobs
    )
    reason = None if tokens.reason == pb.FINISH_REASON_UNSPECIFIED else _REASONS.get(tokens.reason, "unspecified")
    return Chunk(tokens.text, tuple(tokens.ids), tuple(logprobs), tokens.sample, reason, tokens.matched_stop)


def generation(chunks: Sequence[Chunk], finished: pb.Finished, *, request_id: str) -> Generation:
    """Make the result of a finished stream from all its chunks and its last message."""
    num_samples = max((part.sample for part in chunks), default=0) + 1
    samples = tuple(_sample([part for part in chunks if part.sample == number]) for number in range(num_samples))
    return Generation(
        text=samples[0].text,
        token_ids=samples[0].token_ids,
        usage=read(Usage, finished.usage),
        timings=read(Timings, finished.timings),
        finish_reason=_REASONS.get(finished.reason, "unspecified"),
        matched_stop=finished.matched_stop,
        request_id=request_id,
        logprobs=samples[0].logprobs,
        samples=samples,
    )


def set_field(message: WireMessage, name: str, value: object) -> None:
    """Set one field; a value that does not fit is an InvalidRequest naming the field."""
    try:
        setattr(message, name, value)
    except (TypeError, ValueError) as error:
        raise _unsendable(message, name, value, error) from None


def _unsendable(message: WireMessage, name: str, value: object, error: Exception) -> InvalidRequest:
    """Say what a field takes instead of a value that protobuf refused."""
    kind = message.DESCRIPTOR.fields_by_name[name].type
    return InvalidRequest(f"{name} = {value!r:.200} cannot be sent ({error}); give {_TAKEN.get(kind, 'another value')}")


def _sample(chunks: Sequence[Chunk]) -> Sample:
    return Sample(
        text="".join(part.text for part in chunks),
        token_ids=tuple(token for part in chunks for token in part.token_ids),
        finish_reason=chunks[-1].finish_reason or "unspecified" if chunks else "unspecified",
        matched_stop=chunks[-1].matched_stop if chunks else "",
        logprobs=tuple(logprobs for part in chunks for logprobs in part.logprobs),
    )


def _set_sampling(sampling: pb.Sampling, settings: GenerateSettings) -> None:
    for name in _SAMPLING_FIELDS:
        set_field(sampling, name, getattr(settings, name))
    set_field(sampling, "n", settings.n)
    for name in ("seed", "logprobs"):
        if getattr(settings, name) is not None:
            set_field(sampling, name, getattr(settings, name))
    try:
        sampling.logit_bias.update(settings.logit_bias)
    except (TypeError, ValueError, AttributeError) as error:
        raise InvalidRequest(
            f"logit_bias = {settings.logit_bias!r:.200} cannot be sent ({error}); give a dict of token ids and numbers"
        ) from None


def _text_prompt(text: str) -> pb.Prompt:
    prompt = pb.Prompt()
    set_field(prompt, "text", text)
    return prompt


def _token_prompt(ids: list[Any]) -> pb.Prompt:
    prompt = pb.Prompt(tokens=pb.TokenIds())
    _extend(prompt.tokens, "ids", ids)
    return prompt


def _chat_prompt(messages: list[Any]) -> pb.Prompt:
    prompt = pb.Prompt(chat=pb.Chat())
    for position, message in enumerate(messages):
        if not isinstance(message, Mapping) or set(message) != {"role", "content"}:
            raise InvalidRequest(f"messages[{position}] is {message!r}; give a dict with exactly role and content")
        turn = prompt.chat.messages.add()
        set_field(turn, "role", message["role"])
        set_field(turn, "content", message["content"])
    return prompt


def _tool_text(tool: Tool, place: int) -> str:
    if not isinstance(tool, Mapping):
        raise InvalidRequest(f"tools[{place}] is {tool!r:.200}; give a dict that can be written as JSON")
    try:
        return json.dumps(dict(tool), ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"tools[{place}] cannot be written as JSON: {error}") from None


def _extend(message: WireMessage, name: str, values: Iterable[object]) -> None:
    try:
        getattr(message, name).extend(values)
    except (TypeError, ValueError) as error:
        raise _unsendable(message, name, values, error) from None


def _field(hint: Any, message: WireMessage, name: str) -> Any:  # noqa: ANN401 - annotations and field values of any type
    if get_origin(hint) is UnionType:
        return _plain(get_args(hint)[0], getattr(message, name)) if message.HasField(name) else None
    return _plain(hint, getattr(message, name))


def _plain(hint: Any, value: Any) -> Any:  # noqa: ANN401 - annotations and field values of any type
    if is_dataclass(hint):
        return read(hint, value)  # type: ignore[arg-type]
    if get_origin(hint) is tuple:
        return tuple(_plain(get_args(hint)[0], entry) for entry in value)
    return dict(sorted(value.items())) if get_origin(hint) is Mapping else value
