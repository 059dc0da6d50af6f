"""``prefixcache doctor``: is a worker sound, with whom can it share, and how near the machine's limits does it run?"""

from dataclasses import asdict
from typing import Annotated

import typer

from prefixcache.cli.doctor_report import print_diagnosis, print_differences, verdict
from prefixcache.cli.options import (
    DEFAULT_ADDRESS,
    AddressOption,
    FormatOption,
    OutputFormat,
    TimeoutOption,
    connect,
)
from prefixcache.cli.output import print_json, spinner


def doctor(
    no_measure: Annotated[bool, typer.Option("--no-measure", help="Tell what is known; do not measure.")] = False,
    compare: Annotated[
        str | None, typer.Option("--compare", metavar="HOST:PORT", help="Another worker: could the two share prefixes?")
    ] = None,
    address: AddressOption = DEFAULT_ADDRESS,
    timeout: TimeoutOption = 120.0,
    output: FormatOption = OutputFormat.TEXT,
) -> None:
    """Show what a worker proved of its model, what identifies its KV, and how near the machine's limits it runs.

    Measuring takes about two seconds of the model's time, in pieces between the steps of running requests.
    """
    other = None
    if compare is not None:
        with connect(compare, timeout=timeout) as client:
            other = client.diagnose(measure=False)
    with connect(address, timeout=timeout) as client, spinner("measuring …"):
        diagnosis = client.diagnose(measure=not no_measure)
    differences = None if other is None else diagnosis.differences(other)
    if output is OutputFormat.JSON:
        comparison = {"address": compare, "can_share": not differences, "differences": differences}
        print_json(asdict(diagnosis) | ({} if other is None else {"comparison": comparison}))
        return
    print_diagnosis(diagnosis, address=address)
    if differences:
        print_differences(differences, here=address, there=str(compare))
    typer.echo(verdict(diagnosis, compared_with=compare, differences=differences))
