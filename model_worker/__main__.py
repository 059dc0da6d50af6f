"""``python -m model_worker``: load a model and serve it until SIGTERM or SIGINT.

Prints one line of JSON on stdout when it serves; everything else goes to the log
on stderr. Exit codes: 0 stopped as asked, 1 a fault, 2 settings that cannot work.
"""

import argparse
import asyncio
import json
import logging
import math
import os
import signal
import sys
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from model_worker.config import DEFAULT_LISTEN, DEVICES, DTYPES, MAX_THREADS, WorkerSettings
from model_worker.logs import set_up_logging
from prefixcache.config import parse_size
from prefixcache.errors import ConfigError, InternalError, NotFound, PrefixCacheError
from prefixcache.settings_sources import as_flags, read_settings

if TYPE_CHECKING:
    from model_worker.worker import Worker

logger = logging.getLogger("model_worker")


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return number


def _threads(text: str) -> int:
    number = _positive(text)
    if number > MAX_THREADS:
        raise argparse.ArgumentTypeError(f"{text} is more than {MAX_THREADS} threads")
    return number


def _not_negative(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{text} is negative")
    return number


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds from 0 up")
    return seconds


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def parser() -> argparse.ArgumentParser:
    """The flags of a worker."""
    flags = argparse.ArgumentParser(prog="python -m model_worker", description="Serve one model over gRPC.")
    flags.add_argument("--model", default="smollm2-135m", help="a catalogue name, a folder, a .gguf file or org/name")
    flags.add_argument("--trust-remote-code", action="store_true", help="run Python code that the model brings along")
    flags.add_argument("--device", choices=DEVICES, default="auto")
    flags.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="type to compute in")
    flags.add_argument("--listen", default=DEFAULT_LISTEN, metavar="HOST:PORT", help="port 0: any free one")
    flags.add_argument("--insecure", action="store_true", help="allow an address beyond loopback without TLS")
    flags.add_argument("--max-model-len", type=_positive, help="most tokens of prompt and output together")
    flags.add_argument("--max-num-seqs", type=_positive, default=8, help="sequences that run at once")
    flags.add_argument("--max-waiting", type=_not_negative, default=256, help="requests that may wait for a slot")
    flags.add_argument("--max-new-tokens", type=_positive, default=256, help="where a request sets none")
    flags.add_argument("--l1-bytes", type=_size, default=1 << 30, metavar="SIZE", help="memory for cached blocks")
    flags.add_argument("--block-size", type=_positive, help="tokens in a block; 64 on CPU, 256 on CUDA")
    flags.add_argument("--no-cache", action="store_true", help="cache no prefixes")
    flags.add_argument("--threads", type=_threads, help="CPU threads of the model; all by default")
    flags.add_argument("--verify-weights", action="store_true", help="hash the model's files anew at this start")
    flags.add_argument("--grace", type=_seconds, default=30.0, metavar="SECONDS", help="for running requests at stop")
    flags.add_argument("--stop-at-eof", action="store_true", help="stop when standard input is closed")
    flags.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    flags.add_argument("--log-format", choices=("text", "json"), default="text")
    flags.add_argument("--config", type=Path, metavar="FILE", help="TOML with these settings under [worker]")
    return flags


def parse(argv: Sequence[str], environment: Mapping[str, str]) -> argparse.Namespace:
    """The settings of file, variables and flags together; ConfigError for what is none."""
    flags = parser()
    given = flags.parse_args(argv)
    names = set(vars(given)) - {"config"}
    settings = as_flags(read_settings(names, environment, file=given.config))
    return flags.parse_args([*settings, *argv])


def settings_from(arguments: argparse.Namespace) -> WorkerSettings:
    """The settings behind parsed flags."""
    return WorkerSettings(
        model=arguments.model,
        device=arguments.device,
        dtype=arguments.dtype,
        listen=arguments.listen,
        is_insecure=arguments.insecure,
        max_model_len=arguments.max_model_len,
        max_num_seqs=arguments.max_num_seqs,
        max_waiting=arguments.max_waiting,
        default_max_new_tokens=arguments.max_new_tokens,
        block_size=arguments.block_size,
        l1_bytes=arguments.l1_bytes,
        is_cache_enabled=not arguments.no_cache,
        is_remote_code_trusted=arguments.trust_remote_code,
        num_threads=arguments.threads,
        verifies_weights=arguments.verify_weights,
        grace_s=arguments.grace,
        stops_at_eof=arguments.stop_at_eof,
    )


def load(settings: WorkerSettings) -> "Worker":
    """Build the worker, once address and model are known to be there; SIGTERM and SIGINT end the process at once."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _exit_at_once)
    from model_worker.models.catalog import resolve
    from model_worker.rpc.listening import check_listen, parse_listen

    asyncio.run(check_listen(parse_listen(settings.listen), insecure=settings.is_insecure))
    resolve(settings.model, with_code=settings.is_remote_code_trusted)
    from model_worker.worker import build, tune_process

    worker = build(settings)
    tune_process()
    return worker


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
    await worker.engine.start()
    try:
        address = await server.start()
        ready = {"event": "ready", "address": address, "model": worker.engine.description.model}
        print(json.dumps(ready), flush=True)  # noqa: T201  the one line a parent process waits for
        logger.info("serving %s on %s", worker.engine.description.model, address)
        await _first(stopping.wait(), worker.engine.wait_failed())
        grace_s = settings.grace_s if stopping.is_set() else 0.0
        logger.info("stopping; running requests have %.0f s to end", grace_s)
        await server.stop(grace_s)
    finally:
        await worker.engine.stop(grace_s=0.0)
    if not stopping.is_set():
        raise InternalError("the engine's loop failed, see above; start the worker again")
    logger.info("stopped")


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
        asyncio.run(serve(load(settings), settings))
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
