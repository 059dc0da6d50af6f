"""``prefixcache generate``: one prompt, one answer."""

from typing import TYPE_CHECKING, Annotated

import typer

from prefixcache.cli.options import (
    DEFAULT_ADDRESS,
    AddressOption,
    BypassOption,
    FormatOption,
    FrequencyPenaltyOption,
    LogitBiasOption,
    MaxNewTokensOption,
    MinNewTokensOption,
    MinPOption,
    OutputFormat,
    PresencePenaltyOption,
    PriorityOption,
    RawOption,
    RepetitionPenaltyOption,
    SaltOption,
    SeedOption,
    SystemOption,
    TemperatureOption,
    TextArgument,
    TimeoutOption,
    ToolsOption,
    TopKOption,
    TopPOption,
    connect,
    read_logit_bias,
)
from prefixcache.cli.output import print_json, summary
from prefixcache.cli.prompts import build_prompt, read_tools

if TYPE_CHECKING:
    from prefixcache.client import GenerateOptions, Generation, GenerationStream, Progress


def generate(
    text: TextArgument,
    system: SystemOption = None,
    raw: RawOption = False,
    tools: ToolsOption = None,
    max_new_tokens: MaxNewTokensOption = None,
    min_new_tokens: MinNewTokensOption = 0,
    temperature: TemperatureOption = 0.0,
    top_k: TopKOption = 0,
    top_p: TopPOption = 1.0,
    min_p: MinPOption = 0.0,
    repetition_penalty: RepetitionPenaltyOption = 1.0,
    presence_penalty: PresencePenaltyOption = 0.0,
    frequency_penalty: FrequencyPenaltyOption = 0.0,
    logit_bias: LogitBiasOption = None,
    seed: SeedOption = None,
    n: Annotated[int, typer.Option("-n", min=1, max=64, help="This many answers to the one prompt.")] = 1,
    stop: Annotated[list[str] | None, typer.Option("--stop", help="Stop before this text; may be repeated.")] = None,
    stop_token_id: Annotated[
        list[int] | None, typer.Option("--stop-token-id", min=0, help="Stop at this token; may be repeated.")
    ] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Do not stop at the model's end tokens.")] = False,
    cache_salt: SaltOption = "",
    bypass_prefix_cache: BypassOption = False,
    priority: PriorityOption = 0,
    logprobs: Annotated[
        int | None,
        typer.Option("--logprobs", min=0, max=20, help="Log-probabilities of tokens and of N best; JSON only."),
    ] = None,
    progress: Annotated[
        bool, typer.Option("--progress", help="Show on stderr how far the prompt is computed.")
    ] = False,
    model: Annotated[str, typer.Option("--model", help="The model to run; the worker's own by default.")] = "",
    request_id: Annotated[
        str | None, typer.Option("--request-id", help="Name of the request in the worker's log.")
    ] = None,
    address: AddressOption = DEFAULT_ADDRESS,
    timeout: TimeoutOption = 120.0,
    output: FormatOption = OutputFormat.TEXT,
) -> None:
    """Generate from a prompt: the answer goes to stdout, a line on tokens and times to stderr.

    The prompt becomes a user message of the model's chat template; --raw sends
    it as plain text.
    """
    if logprobs is not None and output is not OutputFormat.JSON:
        raise typer.BadParameter("--logprobs are shown with --format json alone; add it")
    options: GenerateOptions = {
        "max_new_tokens": max_new_tokens,
        "min_new_tokens": min_new_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "logit_bias": read_logit_bias(logit_bias),
        "seed": seed,
        "n": n,
        "stop": stop or (),
        "stop_token_ids": stop_token_id or (),
        "ignore_eos": ignore_eos,
        "logprobs": logprobs,
        "tools": read_tools(tools),
        "cache_salt": cache_salt,
        "bypass_prefix_cache": bypass_prefix_cache,
        "priority": priority,
        "on_progress": _show_progress if progress else None,
        "model": model,
        "request_id": request_id,
    }
    with connect(address, timeout=timeout) as client:
        prompt = build_prompt(client, text, system=system, raw=raw)
        if output is OutputFormat.JSON:
            print_json(client.generate(prompt, **options))
        elif n > 1:
            _print_samples(client.generate(prompt, **options))
        else:
            _print_stream(client.stream(prompt, **options))


def _show_progress(progress: "Progress") -> None:
    typer.echo(f"{progress.processed_prompt_tokens} of {progress.prompt_tokens} prompt tokens computed", err=True)


def _print_samples(generation: "Generation") -> None:
    """All answers, each under its number, since they arrive interleaved."""
    for number, sample in enumerate(generation.samples):
        typer.secho(f"[{number}]", bold=True)
        typer.echo(sample.text, color=True)
    typer.echo(summary(generation), err=True)


def _print_stream(stream: "GenerationStream") -> None:
    with stream:
        for chunk in stream:
            typer.echo(chunk.text, nl=False, color=True)
    typer.echo()
    typer.echo(summary(stream.result), err=True)
