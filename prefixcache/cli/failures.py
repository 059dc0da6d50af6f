"""Exit codes, and how errors become them."""

import enum
import functools
from collections.abc import Callable
from typing import ParamSpec

import typer

from prefixcache.errors import DeadlineExceeded, EngineStopped, PrefixCacheError

_Parameters = ParamSpec("_Parameters")


class ExitCode(enum.IntEnum):
    """What the command's exit code says."""

    OK = 0
    FAILED = 1
    USAGE = 2
    UNREACHABLE = 3
    DEADLINE = 4
    INTERRUPTED = 130


EPILOG = (
    "Exit codes: 0 done; 1 the request or the worker failed; 2 wrong usage; "
    "3 no worker answers; 4 the deadline passed; 130 interrupted."
)


def exit_code(error: PrefixCacheError) -> ExitCode:
    """The exit code for an error."""
    if isinstance(error, EngineStopped):
        return ExitCode.UNREACHABLE
    return ExitCode.DEADLINE if isinstance(error, DeadlineExceeded) else ExitCode.FAILED


def exits_by_code(verb: Callable[_Parameters, None]) -> Callable[_Parameters, None]:
    """Make a verb print its errors as one line on stderr and exit with their code."""

    @functools.wraps(verb)
    def run(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> None:
        try:
            verb(*args, **kwargs)
        except PrefixCacheError as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(exit_code(error)) from None
        except BrokenPipeError:
            raise  # whoever read the output has enough; typer ends quietly
        except OSError as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(ExitCode.FAILED) from None
        except KeyboardInterrupt:
            typer.echo("interrupted", err=True)
            raise typer.Exit(ExitCode.INTERRUPTED) from None

    return run
