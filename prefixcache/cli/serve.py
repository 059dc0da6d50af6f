"""``prefixcache serve``: run a worker in the foreground."""

import signal
from typing import Annotated, Final, Literal

import typer

from prefixcache.cli import tier_options
from prefixcache.cli.options import DEFAULT_ADDRESS, FormatOption, OutputFormat, size_bytes
from prefixcache.cli.output import print_json
from prefixcache.cli.worker_process import Ready, WorkerProcess, forwarded_signals, require_worker_packages
from prefixcache.errors import EngineStopped

SIGNAL_CODES: Final = 128

Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["bfloat16", "float32"]
Numerics = Literal["strict", "fast"]
MODEL_HELP = "A catalogue name, a folder, a GGUF file or a hub's org/name."
DEVICE_HELP = "Where the model runs."
ModelOption = Annotated[str, typer.Option("--model", help=MODEL_HELP)]
DeviceOption = Annotated[Device, typer.Option("--device", help=DEVICE_HELP)]


def serve(
    model: Annotated[str | None, typer.Option("--model", help=MODEL_HELP)] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code that the model brings along.")
    ] = False,
    device: Annotated[Device | None, typer.Option("--device", help=DEVICE_HELP)] = None,
    dtype: Annotated[Dtype | None, typer.Option("--dtype", help="Type to compute in.")] = None,
    numerics: Annotated[
        Numerics | None, typer.Option("--numerics", help="Fast: hits and misses are equal within rounding only.")
    ] = None,
    listen: Annotated[str | None, typer.Option("--listen", metavar="HOST:PORT", help="Port 0: a free one.")] = None,
    max_model_len: Annotated[int | None, typer.Option(min=1, help="Most tokens of prompt and answer.")] = None,
    max_num_seqs: Annotated[int | None, typer.Option(min=1, help="Sequences that run at once.")] = None,
    max_waiting: Annotated[int | None, typer.Option(min=0, help="Requests that may wait.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="For requests that set none.")] = None,
    prefill_blocks: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Blocks of prompts between two tokens of running streams.")
    ] = None,
    max_reorder_wait: Annotated[
        float | None,
        typer.Option(min=0, metavar="SECONDS", help="How long others with longer cached prefixes may go first."),
    ] = None,
    parking_bytes: Annotated[
        int | None,
        typer.Option(parser=size_bytes, metavar="SIZE", help="Memory for requests that give way to a higher priority."),
    ] = None,
    no_recompute: Annotated[
        bool, typer.Option("--no-recompute", help="Leave generated tokens out of the cache.")
    ] = False,
    l1_bytes: Annotated[
        int | None, typer.Option(parser=size_bytes, metavar="SIZE", help="Memory for cached blocks, such as 2GB.")
    ] = None,
    block_size: Annotated[int | None, typer.Option(min=1, help="Tokens in a cache block.")] = None,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Cache no prefixes.")] = False,
    disk: tier_options.Disk = None,
    disk_bytes: tier_options.DiskBytes = None,
    disk_deadline: tier_options.DiskDeadline = None,
    redis: tier_options.Redis = None,
    redis_username: tier_options.RedisUsername = None,
    redis_password_file: tier_options.RedisPasswordFile = None,
    redis_ca: tier_options.RedisCa = None,
    redis_cert: tier_options.RedisCert = None,
    redis_key: tier_options.RedisKey = None,
    redis_prefix: tier_options.RedisPrefix = None,
    redis_deadline: tier_options.RedisDeadline = None,
    redis_connections: tier_options.RedisConnections = None,
    write_policy: tier_options.WritePolicy = None,
    write_queue_bytes: tier_options.WriteQueueBytes = None,
    tier_ttl: tier_options.TierTtl = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads of the model.")] = None,
    verify_weights: Annotated[
        bool, typer.Option("--verify-weights", help="Hash the model's files anew, whatever is remembered of them.")
    ] = False,
    grace: Annotated[
        float | None, typer.Option(min=0, metavar="SECONDS", help="For running requests when stopping.")
    ] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Allow listening beyond this machine.")] = False,
    config: Annotated[
        str | None, typer.Option(metavar="FILE", help="TOML with these settings under \\[worker]; flags win over it.")
    ] = None,
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"] | None, typer.Option(help="The least that is logged.")
    ] = None,
    log_format: Annotated[Literal["text", "json"] | None, typer.Option(help="Lines of the log.")] = None,
    output: FormatOption = OutputFormat.TEXT,
) -> None:
    """Run a worker until Ctrl-C or SIGTERM; its log goes to stderr.

    What is not given comes from PREFIXCACHE_* variables (PREFIXCACHE_L1_BYTES=2GB), then from the file
    of --config, then it is the worker's default. The exit code is the worker's.
    """
    arguments = worker_arguments(
        model=model,
        trust_remote_code=trust_remote_code,
        device=device,
        dtype=dtype,
        numerics=numerics,
        listen=listen,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_waiting=max_waiting,
        max_new_tokens=max_new_tokens,
        prefill_blocks=prefill_blocks,
        max_reorder_wait=max_reorder_wait,
        parking_bytes=parking_bytes,
        no_recompute=no_recompute,
        l1_bytes=l1_bytes,
        block_size=block_size,
        no_cache=no_cache,
        disk=disk,
        disk_bytes=disk_bytes,
        disk_deadline=disk_deadline,
        redis=redis,
        redis_username=redis_username,
        redis_password_file=redis_password_file,
        redis_ca=redis_ca,
        redis_cert=redis_cert,
        redis_key=redis_key,
        redis_prefix=redis_prefix,
        redis_deadline=redis_deadline,
        redis_connections=redis_connections,
        write_policy=write_policy,
        write_queue_bytes=write_queue_bytes,
        tier_ttl=tier_ttl,
        threads=threads,
        verify_weights=verify_weights,
        grace=grace,
        insecure=insecure,
        config=config,
        log_level=log_level,
        log_format=log_format,
    )
    require_worker_packages()
    typer.echo(f"starting a worker with {model} …" if model else "starting a worker …", err=True)
    raise typer.Exit(_run(arguments, output=output))


def worker_arguments(**flags: str | float | bool | None) -> list[str]:
    """Write the worker's flags; those that are None or False are left out.

    >>> worker_arguments(model="m", max_num_seqs=4, no_cache=True, dtype=None)
    ['--model', 'm', '--max-num-seqs', '4', '--no-cache']
    """
    arguments: list[str] = []
    for name, value in flags.items():
        if value is None or value is False:
            continue
        arguments.append("--" + name.replace("_", "-"))
        if value is not True:
            arguments.append(str(value))
    return arguments


def _run(arguments: list[str], *, output: OutputFormat) -> int:
    with WorkerProcess(arguments) as worker, forwarded_signals(worker):
        try:
            _announce(worker.wait_ready(), output=output)
        except EngineStopped as error:
            code = worker.wait()
            if code != 0:
                typer.echo(f"error: {error}", err=True)
            return code
        code = worker.wait()
        if code > SIGNAL_CODES:
            typer.echo(f"error: {_killed_by(code - SIGNAL_CODES)}", err=True)
        return code


def _killed_by(number: int) -> str:
    cause = "; if nobody did that, the system may have run out of memory" if number == signal.SIGKILL else ""
    return f"the worker was killed by signal {number}{cause}"


def _announce(ready: Ready, *, output: OutputFormat) -> None:
    if output is OutputFormat.JSON:
        print_json({"event": "ready", "address": ready.address, "model": ready.model})
        return
    where = "" if ready.address == DEFAULT_ADDRESS else f" --address {ready.address}"
    typer.echo(f'ready on {ready.address}, serving {ready.model}; try: prefixcache generate{where} "Hello"')
