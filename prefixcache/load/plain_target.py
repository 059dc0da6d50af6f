"""Plain transformers as a target: a ``python -m model_worker.plain`` process spoken to in lines of JSON."""

import asyncio
import itertools
import json
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import IO, Any, Final

from prefixcache.errors import EngineStopped, InternalError
from prefixcache.load.conversation import Answer, Request

MAX_LINE_BYTES: Final = 16 * 2**20
STOP_GRACE_S: Final = 2.0


@dataclass(slots=True)
class _Pending:
    on_tokens: Callable[[int], None]
    answer: asyncio.Future[Answer] = field(default_factory=asyncio.Future)


class PlainTarget:
    """A running process of plain transformers; see ``plain_target`` for how to get one."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._pending: dict[int, _Pending] = {}
        self._numbers = itertools.count()
        self._has_ended = False

    async def send(self, request: Request, on_tokens: Callable[[int], None]) -> Answer:
        """Generate greedily; see ``Target``. What the process may have cached is unknown."""
        if self._has_ended:
            raise _ended()
        number, pending = next(self._numbers), _Pending(on_tokens)
        self._pending[number] = pending
        line = json.dumps({"id": number, **_fields(request)})
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line.encode() + b"\n")
            await self._process.stdin.drain()
            return await pending.answer
        except (BrokenPipeError, ConnectionResetError):
            raise _ended() from None
        finally:
            self._pending.pop(number, None)

    async def wait_ready(self) -> None:
        """Wait until the model is loaded; EngineStopped if the process ends before."""
        async for event in self._events():
            if event["event"] == "ready":
                return
        raise EngineStopped(f"plain transformers ended with code {await self._process.wait()} before it was ready")

    async def route_events(self) -> None:
        """Hand events to their requests until the process ends, which fails all that are open."""
        async for event in self._events():
            self._route(event)
        self._has_ended = True
        for pending in self._pending.values():
            _settle(pending, _ended())

    def _route(self, event: dict[str, Any]) -> None:
        pending = self._pending.get(event["id"])
        if pending is None:
            return
        match event["event"]:
            case "tokens":
                pending.on_tokens(event["num_tokens"])
            case "finished":
                _settle(pending, Answer(tuple(event["token_ids"]), event["text"], event["prompt_tokens"], None))
            case "failed":
                _settle(pending, InternalError(f"plain transformers: {event['message']}"))

    async def _events(self) -> AsyncIterator[dict[str, Any]]:
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            yield json.loads(line)


@asynccontextmanager
async def plain_target(arguments: Sequence[str], *, log: IO[bytes]) -> AsyncIterator[PlainTarget]:
    """Start plain transformers with the flags of ``model_worker.plain``, wait until it is ready, stop it at the end."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "model_worker.plain", *arguments),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=log,
        limit=MAX_LINE_BYTES,
        start_new_session=True,
    )
    target = PlainTarget(process)
    routing: asyncio.Task[None] | None = None
    try:
        await target.wait_ready()
        routing = asyncio.create_task(target.route_events())
        yield target
    finally:
        if routing is not None:
            routing.cancel()
        await _stop(process)


async def _stop(process: asyncio.subprocess.Process) -> None:
    assert process.stdin is not None
    process.stdin.close()
    try:
        await asyncio.wait_for(process.wait(), STOP_GRACE_S)
    except TimeoutError:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
    except BaseException:
        with suppress(ProcessLookupError):
            process.kill()
        raise


def _ended() -> EngineStopped:
    return EngineStopped("plain transformers' process has ended; its log says why")


def _settle(pending: _Pending, outcome: Answer | Exception) -> None:
    if pending.answer.done():
        return
    if isinstance(outcome, Exception):
        pending.answer.set_exception(outcome)
    else:
        pending.answer.set_result(outcome)


def _fields(request: Request) -> dict[str, object]:
    prompt = request.prompt
    if isinstance(prompt, str):
        name = "text"
    else:
        name = "token_ids" if all(isinstance(element, int) for element in prompt) else "messages"
    return {name: prompt, "max_new_tokens": request.max_new_tokens}
