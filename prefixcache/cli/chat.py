"""``prefixcache chat``: a conversation in the terminal."""

import contextlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

import typer

from prefixcache.cli.options import (
    DEFAULT_ADDRESS,
    AddressOption,
    FormatOption,
    MaxNewTokensOption,
    OutputFormat,
    SaltOption,
    SeedOption,
    SystemOption,
    TemperatureOption,
    TimeoutOption,
    TopKOption,
    TopPOption,
    connect,
)
from prefixcache.cli.output import print_json, summary
from prefixcache.cli.prompts import read_stdin, system_messages
from prefixcache.errors import InvalidRequest, PrefixCacheError

if TYPE_CHECKING:
    from prefixcache.client import Client, GenerateOptions, Generation
    from prefixcache.client.types import Message


def chat(
    system: SystemOption = None,
    max_new_tokens: MaxNewTokensOption = None,
    temperature: TemperatureOption = 0.0,
    top_k: TopKOption = 0,
    top_p: TopPOption = 1.0,
    seed: SeedOption = None,
    cache_salt: SaltOption = "",
    address: AddressOption = DEFAULT_ADDRESS,
    timeout: TimeoutOption = 120.0,
    output: FormatOption = OutputFormat.TEXT,
) -> None:
    """Talk with the model. /reset starts over, /quit or Ctrl-D leaves, Ctrl-C stops the current answer only.

    Where stdin is no terminal, each line of it is one turn.
    """
    options: GenerateOptions = {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "seed": seed,
        "cache_salt": cache_salt,
    }
    if sys.stdin is None:  # the parent process closed it
        raise typer.BadParameter("stdin is closed; chat reads from it what you say")
    with connect(address, timeout=timeout) as client:
        if not client.model_info().has_chat_template:
            raise InvalidRequest("the model has no chat template; use `prefixcache generate --raw`")
        show = _show_json if output is OutputFormat.JSON else _show_text
        Conversation(client, system_messages(system), options=options, show=show).run()


class Conversation:
    """The loop over turns; ``show`` prints one turn's answer and gives its text, None to forget the turn."""

    def __init__(
        self,
        client: "Client",
        opening: "list[Message]",
        *,
        options: "GenerateOptions",
        show: "Callable[[Client, list[Message], GenerateOptions], str | None]",
    ) -> None:
        self._client = client
        self._opening = opening
        self._options = options
        self._show = show
        self._messages: list[Message] = list(opening)

    def run(self) -> None:
        """Take turns until the input ends or ``/quit``."""
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - gives input() line editing and history
        while (line := _read_line()) is not None and line != "/quit":
            if line == "/reset":
                self._messages = list(self._opening)
            elif line:
                self._take_turn(line)

    def _take_turn(self, text: str) -> None:
        turn: Message = {"role": "user", "content": text}
        try:
            answer = self._show(self._client, [*self._messages, turn], self._options)
        except PrefixCacheError as error:
            if not sys.stdin.isatty():
                raise
            typer.echo(f"error: {error}", err=True)
            return
        if answer is not None:
            self._messages += [turn, {"role": "assistant", "content": answer}]


def _read_line() -> str | None:
    if not sys.stdin.isatty():
        line = read_stdin(sys.stdin.readline)
        return line.strip() if line else None
    try:
        return input("> ").strip()
    except EOFError:
        typer.echo()
        return None
    except KeyboardInterrupt:
        typer.echo("\n(/quit or Ctrl-D leaves)", err=True)
        return ""


def _show_text(client: "Client", messages: "list[Message]", options: "GenerateOptions") -> str:
    text = ""
    with client.stream(messages, **options) as stream:
        try:
            for chunk in stream:
                text += chunk.text
                sys.stdout.write(chunk.text)
                sys.stdout.flush()
        except KeyboardInterrupt:
            typer.echo("\n(stopped)", err=True)
            return text
    typer.echo()
    typer.echo(f"[{summary(stream.result)}]", err=True)
    return stream.result.text


def _show_json(client: "Client", messages: "list[Message]", options: "GenerateOptions") -> str | None:
    try:
        answer: Generation = client.chat(messages, **options)
    except KeyboardInterrupt:
        typer.echo("(stopped; this turn is forgotten)", err=True)
        return None
    print_json(answer)
    return answer.text
