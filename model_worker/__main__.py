"""``python -m model_worker``: load a model and serve it until SIGTERM or SIGINT.

Prints one line of JSON on stdout when it serves; everything else goes to the log
on stderr. Exit codes: 0 stopped as asked, 1 a fault, 2 settings that cannot work.
"""

import asyncio
import json
import logging
import os
import signal
import sys
from collections.abc import Coroutine, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from model_worker.config import WorkerSettings
from model_worker.flags import parse, settings_from
from model_worker.logs import set_up_logging
from model_worker.serving import running_worker
from prefixcache.errors import ConfigError, InternalError, NotFound, PrefixCacheError

if TYPE_CHECKING:
    from model_worker.worker import Worker

logger = logging.getLogger("model_worker")


async def run(settings: WorkerSettings) -> None:
    """Build the worker, once address and model are known to be there, and serve until the process is told to stop.

    Before it serves, SIGTERM and SIGINT end the process at once.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _exit_at_once)
    from model_worker.models.catalog import resolve
    from model_worker.rpc.listening import check_listen, parse_listen

    await check_listen(parse_listen(settings.listen), insecure=settings.is_insecure)
    resolve(settings.model, with_code=settings.is_remote_code_trusted)
    async with running_worker(settings) as worker:
        from model_worker.worker import tune_process

        tune_process()
        await serve(worker, settings)


def _exit_at_once(number: int, frame: FrameType | None) -> NoReturn:
    """Leave without waiting for the threads that download or load."""
    logger.info("stopped before serving")
    logging.shutdown()
    os._exit(0)


async def serve(worker: "Worker", settings: WorkerSettings) -> None:
    """Serve, and stop gracefully at SIGTERM or SIGINT; raises InternalError where the engine's loop fails."""
    from model_worker.rpc.connections import raise_file_limit
    from model_worker.rpc.server import Server

    raise_file_limit()
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    if settings.stops_at_eof:
        loop.add_reader(sys.stdin.fileno(), _read_to_eof, stopping)
    server = Server(worker.engine, listen=settings.listen, insecure=settings.is_insecure)
    address = await server.start()
    ready = {"event": "ready", "address": address, "model": worker.engine.description.model}
    print(json.dumps(ready), flush=True)  # noqa: T201  the one line a parent process waits for
    logger.info("serving %s on %s", worker.engine.description.model, address)
    await _first(stopping.wait(), worker.engine.wait_failed())
    grace_s = settings.grace_s if stopping.is_set() else 0.0
    logger.info("stopping; running requests have %.0f s to end", grace_s)
    await server.stop(grace_s)
    if not stopping.is_set():
        raise InternalError("the engine's loop failed, see above; start the worker again")


def _read_to_eof(stopping: asyncio.Event) -> None:
    """Take what standard input has; at its end, whoever started this process is gone."""
    if not os.read(sys.stdin.fileno(), 4_096):
        asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
        stopping.set()


async def _first(*waits: Coroutine[Any, Any, object]) -> None:
    tasks = [asyncio.create_task(wait) for wait in waits]
    _, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()


def main(argv: Sequence[str] | None = None) -> int:
    """Run a worker; the exit code."""
    try:
        arguments = parse(sys.argv[1:] if argv is None else argv, os.environ)
    except ConfigError as error:
        set_up_logging(level="info", log_format="text")
        logger.error("%s", error)
        return 2
    set_up_logging(level=arguments.log_level, log_format=arguments.log_format)
    try:
        settings = settings_from(arguments)
        asyncio.run(run(settings))
        logger.info("stopped")
    except (ConfigError, NotFound) as error:
        logger.error("%s", error)
        return 2
    except PrefixCacheError:
        logger.exception("the worker failed")
        return 1
    except KeyboardInterrupt:
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
