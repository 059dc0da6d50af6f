"""A worker's settings as flags, with what a TOML file and variables add to them."""

import argparse
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from model_worker.config import (
    DAY_S,
    DEFAULT_LISTEN,
    DEVICES,
    DTYPES,
    MAX_THREADS,
    NUMERICS,
    TierSettings,
    WorkerSettings,
)
from prefixcache.config import parse_size
from prefixcache.errors import ConfigError
from prefixcache.settings_sources import as_flags, read_settings
from prefixcache.storage.remote_options import RemoteOptions
from prefixcache.storage.tiered import WritePolicy


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number") from error


def _positive(text: str) -> int:
    number = _whole(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return number


def _threads(text: str) -> int:
    number = _positive(text)
    if number > MAX_THREADS:
        raise argparse.ArgumentTypeError(f"{text} is more than {MAX_THREADS} threads")
    return number


def _not_negative(text: str) -> int:
    number = _whole(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{text} is negative")
    return number


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
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
    flags.add_argument(
        "--numerics", choices=NUMERICS, default="strict", help="fast: hits and misses alike within rounding only"
    )
    flags.add_argument("--listen", default=DEFAULT_LISTEN, metavar="HOST:PORT", help="port 0: any free one")
    flags.add_argument("--insecure", action="store_true", help="allow an address beyond loopback without TLS")
    flags.add_argument("--max-model-len", type=_positive, help="most tokens of prompt and output together")
    flags.add_argument("--max-num-seqs", type=_positive, default=8, help="sequences that run at once")
    flags.add_argument("--max-waiting", type=_not_negative, default=256, help="requests that may wait for a slot")
    flags.add_argument("--max-new-tokens", type=_positive, default=256, help="where a request sets none")
    _add_scheduling_flags(flags)
    flags.add_argument("--l1-bytes", type=_size, default=1 << 30, metavar="SIZE", help="memory for cached blocks")
    flags.add_argument("--block-size", type=_positive, help="tokens in a block; 64 on CPU, 256 on CUDA")
    flags.add_argument("--no-cache", action="store_true", help="cache no prefixes")
    _add_tier_flags(flags)
    flags.add_argument("--threads", type=_threads, help="CPU threads of the model; all by default")
    flags.add_argument("--verify-weights", action="store_true", help="hash the model's files anew at this start")
    flags.add_argument("--grace", type=_seconds, default=30.0, metavar="SECONDS", help="for running requests at stop")
    flags.add_argument("--stop-at-eof", action="store_true", help="stop when standard input is closed")
    flags.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    flags.add_argument("--log-format", choices=("text", "json"), default="text")
    flags.add_argument("--config", type=Path, metavar="FILE", help="TOML with these settings under [worker]")
    return flags


def _add_scheduling_flags(flags: argparse.ArgumentParser) -> None:
    scheduling = flags.add_argument_group("scheduling")
    scheduling.add_argument(
        "--prefill-blocks", type=_positive, default=1, metavar="N", help="blocks of prompts between two decode steps"
    )
    scheduling.add_argument(
        "--max-reorder-wait",
        type=_seconds,
        default=5.0,
        metavar="SECONDS",
        help="how long others with longer cached prefixes may go first",
    )
    scheduling.add_argument(
        "--parking-bytes",
        type=_size,
        default=256 << 20,
        metavar="SIZE",
        help="memory for requests that give way to a higher priority; 0: none does",
    )
    scheduling.add_argument("--no-recompute", action="store_true", help="leave generated tokens out of the cache")


def _add_tier_flags(flags: argparse.ArgumentParser) -> None:
    tiers = flags.add_argument_group("tiers below memory")
    tiers.add_argument("--disk", type=Path, metavar="DIR", help="keep blocks in this folder, across restarts")
    tiers.add_argument("--disk-bytes", type=_size, default=10 * 10**9, metavar="SIZE", help="what it may take on disk")
    tiers.add_argument("--disk-deadline", type=_seconds, default=2.0, metavar="SECONDS", help="for one call to it")
    tiers.add_argument("--redis", metavar="URL", help="share blocks with other workers; see deploy/README.md for forms")
    tiers.add_argument("--redis-username", metavar="NAME", help="instead of the URL's")
    tiers.add_argument("--redis-password-file", type=Path, metavar="FILE", help="its first line, instead of the URL's")
    tiers.add_argument("--redis-ca", type=Path, metavar="FILE", help="PEM file of who signed the server's certificate")
    tiers.add_argument("--redis-cert", type=Path, metavar="FILE", help="this worker's certificate, PEM")
    tiers.add_argument("--redis-key", type=Path, metavar="FILE", help="its key, PEM")
    tiers.add_argument("--redis-prefix", default="prefixcache", metavar="NAME", help="what its keys begin with")
    tiers.add_argument("--redis-deadline", type=_seconds, default=1.0, metavar="SECONDS", help="for one call to it")
    tiers.add_argument("--redis-connections", type=_positive, default=4, help="connections to each of its servers")
    tiers.add_argument(
        "--write-policy",
        choices=("write_through", "selective"),
        default="write_through",
        help="write blocks when computed, or when first used again",
    )
    tiers.add_argument(
        "--write-queue-bytes",
        type=_size,
        default=256 << 20,
        metavar="SIZE",
        help="memory for blocks that wait to be written, for each tier",
    )
    tiers.add_argument(
        "--tier-ttl", type=_seconds, default=DAY_S, metavar="SECONDS", help="how long a block lives after its last use"
    )


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
        numerics=arguments.numerics,
        listen=arguments.listen,
        is_insecure=arguments.insecure,
        max_model_len=arguments.max_model_len,
        max_num_seqs=arguments.max_num_seqs,
        max_waiting=arguments.max_waiting,
        default_max_new_tokens=arguments.max_new_tokens,
        prefill_blocks=arguments.prefill_blocks,
        max_reorder_wait_s=arguments.max_reorder_wait,
        parking_bytes=arguments.parking_bytes,
        is_recompute_enabled=not arguments.no_recompute,
        block_size=arguments.block_size,
        l1_bytes=arguments.l1_bytes,
        is_cache_enabled=not arguments.no_cache,
        is_remote_code_trusted=arguments.trust_remote_code,
        num_threads=arguments.threads,
        verifies_weights=arguments.verify_weights,
        grace_s=arguments.grace,
        stops_at_eof=arguments.stop_at_eof,
        tiers=_tiers_from(arguments),
    )


def _tiers_from(arguments: argparse.Namespace) -> TierSettings:
    return TierSettings(
        redis=_redis_from(arguments) if arguments.redis else None,
        disk=arguments.disk,
        disk_bytes=arguments.disk_bytes,
        disk_deadline_s=arguments.disk_deadline,
        write_policy=WritePolicy(arguments.write_policy),
        write_queue_bytes=arguments.write_queue_bytes,
        ttl_s=arguments.tier_ttl,
    )


def _redis_from(arguments: argparse.Namespace) -> RemoteOptions:
    password_file = arguments.redis_password_file
    return RemoteOptions(
        url=arguments.redis,
        username=arguments.redis_username,
        password=None if password_file is None else _first_line(password_file),
        ca_file=arguments.redis_ca,
        certificate_file=arguments.redis_cert,
        key_file=arguments.redis_key,
        key_prefix=arguments.redis_prefix,
        deadline_s=arguments.redis_deadline,
        num_connections=arguments.redis_connections,
    )


def _first_line(file: Path) -> str:
    try:
        return file.read_text().split("\n", 1)[0].strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the password file {file} cannot be read: {error}") from error
