"""From a ``Prompt`` message to token ids: the one way of Generate, Tokenize and Lookup."""

import json
from dataclasses import dataclass

from model_worker.rpc.backend import Backend
from model_worker.rpc.bounds import (
    LONG_PROMPT_BYTES,
    MAX_CHAT_MESSAGES,
    MAX_PROMPT_BYTES,
    MAX_PROMPT_IDS,
    MAX_ROLE_BYTES,
    MAX_TOOLS,
    MAX_TOOLS_BYTES,
    check_count,
    check_size,
    check_token_ids,
    shown,
)
from prefixcache.errors import InvalidRequest
from prefixcache.pb.v1 import worker_pb2


@dataclass(frozen=True, slots=True)
class ResolvedPrompt:
    """Token ids, at least one, and the text they were made from; None where ids were sent."""

    token_ids: list[int]
    text: str | None


async def resolve_prompt(
    prompt: worker_pb2.Prompt, backend: Backend, *, max_tokens: int | None = None
) -> ResolvedPrompt:
    """Validate a prompt and tokenize it in the I/O pool; raises InvalidRequest.

    A long text that surely has more than ``max_tokens`` tokens is refused before it is tokenized;
    of others the engine counts the tokens.
    """
    kind = prompt.WhichOneof("input")
    if kind == "text":
        resolved = await _resolve_text(prompt.text, backend, max_tokens=max_tokens)
    elif kind == "chat":
        resolved = await _resolve_chat(prompt.chat, backend, max_tokens=max_tokens)
    elif kind == "tokens":
        resolved = _resolve_tokens(prompt.tokens, backend)
    else:
        raise InvalidRequest("prompt is not set; set one of prompt.text, prompt.chat and prompt.tokens")
    if not resolved.token_ids:
        raise InvalidRequest(f"prompt.{kind} has no tokens; send a prompt of at least one token")
    return resolved


async def _resolve_text(text: str, backend: Backend, *, max_tokens: int | None) -> ResolvedPrompt:
    if check_size(text, field="prompt.text", limit=MAX_PROMPT_BYTES) <= LONG_PROMPT_BYTES:
        return ResolvedPrompt(await backend.run_io(backend.tokenizer.encode_text, text), text)

    def check_and_encode() -> list[int]:
        _check_fits(text, backend, field="prompt.text", max_tokens=max_tokens)
        return backend.tokenizer.encode_text(text)

    return ResolvedPrompt(await backend.run_long_io(check_and_encode), text)


async def _resolve_chat(chat: worker_pb2.Chat, backend: Backend, *, max_tokens: int | None) -> ResolvedPrompt:
    if not backend.tokenizer.has_chat_template:
        model = backend.description.model
        raise InvalidRequest(
            f"prompt.chat cannot be rendered: model {model!r} has no chat template; send prompt.text or prompt.tokens"
        )
    messages = _checked_messages(chat)
    _check_tools(chat, backend)

    def render_and_encode() -> ResolvedPrompt:
        tools = [_tool(text, index) for index, text in enumerate(chat.tools)]
        text = backend.tokenizer.render_chat(messages, tools)
        _check_fits(text, backend, field="prompt.chat", max_tokens=max_tokens)
        return ResolvedPrompt(backend.tokenizer.encode_rendered(text), text)

    run = backend.run_io if chat.ByteSize() <= LONG_PROMPT_BYTES else backend.run_long_io
    return await run(render_and_encode)


def _check_fits(text: str, backend: Backend, *, field: str, max_tokens: int | None) -> None:
    if max_tokens is None or len(text) <= LONG_PROMPT_BYTES:
        return
    fewest = backend.tokenizer.fewest_tokens(text)
    if fewest > max_tokens:
        raise InvalidRequest(
            f"{field} has {len(text)} characters, which are {fewest} tokens at least, and the model's window leaves "
            f"{max_tokens} to a prompt; shorten it, or give the worker a larger max_model_len if its model has the "
            f"positions"
        )


def _checked_messages(chat: worker_pb2.Chat) -> list[dict[str, str]]:
    field = "prompt.chat.messages"
    if not chat.messages:
        raise InvalidRequest(f"{field} is empty; send at least one message")
    check_count(len(chat.messages), field=field, limit=MAX_CHAT_MESSAGES)
    for index, message in enumerate(chat.messages):
        if not message.role or len(message.role.encode()) > MAX_ROLE_BYTES:
            raise InvalidRequest(
                f"{field}[{index}].role is {shown(message.role)}; send a role the model's chat template accepts, "
                "such as 'user'"
            )
    num_bytes = sum(len(message.content.encode()) for message in chat.messages)
    if num_bytes > MAX_PROMPT_BYTES:
        raise InvalidRequest(f"{field} have {num_bytes} bytes of content; send at most {MAX_PROMPT_BYTES}")
    return [{"role": message.role, "content": message.content} for message in chat.messages]


def _check_tools(chat: worker_pb2.Chat, backend: Backend) -> None:
    field = "prompt.chat.tools"
    check_count(len(chat.tools), field=field, limit=MAX_TOOLS)
    num_bytes = sum(len(tool.encode()) for tool in chat.tools)
    if num_bytes > MAX_TOOLS_BYTES:
        raise InvalidRequest(f"{field} have {num_bytes} bytes; send at most {MAX_TOOLS_BYTES}")
    if chat.tools and not backend.tokenizer.takes_tools:
        model = backend.description.model
        raise InvalidRequest(f"{field} is set and the chat template of model {model!r} takes no tools; leave it out")


def _tool(text: str, index: int) -> dict[str, object]:
    field = f"prompt.chat.tools[{index}]"
    try:
        tool = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{field} is not JSON ({error}): {shown(text)}; send a JSON object") from None
    if not isinstance(tool, dict):
        raise InvalidRequest(f"{field} is {shown(text)}; send a JSON object")
    return tool


def _resolve_tokens(tokens: worker_pb2.TokenIds, backend: Backend) -> ResolvedPrompt:
    field = "prompt.tokens.ids"
    check_count(len(tokens.ids), field=field, limit=MAX_PROMPT_IDS)
    ids = list(tokens.ids)
    check_token_ids(ids, field=field, vocab_size=backend.description.vocab_size)
    return ResolvedPrompt(ids, None)
