"""From what was typed to a prompt."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from prefixcache.client import Client
    from prefixcache.client.types import Message, Prompt, Tool


def typed_text(text: str) -> str:
    """The text itself, or all of stdin for ``-``."""
    if text != "-":
        return text
    if sys.stdin is None:  # the parent process closed it
        raise typer.BadParameter("stdin is closed; give the text as an argument")
    return read_stdin(sys.stdin.read)


def read_stdin(read: Callable[[], str]) -> str:
    """What ``read`` takes from stdin; bytes that are no text are a usage error."""
    try:
        text = read()
        text.encode()  # some locales let undecodable bytes through as lone surrogates
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        raise typer.BadParameter(f"stdin is not UTF-8 text: {error.reason}") from None
    return text


def system_messages(system: str | None) -> list["Message"]:
    """The system message given as text or as ``@file``, or none."""
    if system is None:
        return []
    return [{"role": "system", "content": _read_file(system[1:]) if system.startswith("@") else system}]


def build_prompt(client: "Client", text: str, *, system: str | None, raw: bool) -> "Prompt":
    """Plain text where asked for or where the model has no chat template, else a chat of one turn."""
    if raw and system is not None:
        raise typer.BadParameter("--system needs the chat template; leave out --raw")
    content = typed_text(text)
    if raw:
        return content
    if system is None and not client.model_info().has_chat_template:
        return content
    turn: Message = {"role": "user", "content": content}
    return [*system_messages(system), turn]


def read_tools(name: str | None) -> "list[Tool]":
    """The tools of a JSON file: a list of objects, each in the form the model's template expects."""
    if name is None:
        return []
    try:
        tools = json.loads(_read_file(name))
    except (ValueError, RecursionError) as error:
        raise typer.BadParameter(f"{name!r} is not JSON: {error}") from None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise typer.BadParameter(f"{name!r} has no list of JSON objects")
    return tools


def _read_file(name: str) -> str:
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"cannot read {name!r}: {error}") from None
