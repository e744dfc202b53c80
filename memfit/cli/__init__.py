"""The command line: one file per verb, each of which parses, calls, renders and exits.

stdout carries the answer, stderr progress and warnings. Nothing heavy is imported before a verb
needs it: `memfit --help` loads neither torch, pandas nor matplotlib.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated, NoReturn

import typer

from memfit.cli import doctor, gate, gpus, plan, probe, report, run, verify

_EPILOG = (
    "Exit status: 0 ok, 1 gate failed, 2 usage, 3 nothing fits, 4 the workload's own error, "
    "5 cannot judge, 70 a bug in memfit, 130 interrupted."
)

app = typer.Typer(
    name="memfit",
    help="Find the largest microbatch that really trains on a device, and the accumulation steps "
    "that keep the logical batch.",
    epilog=_EPILOG,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(name="probe")(probe.probe)
app.command(name="plan")(plan.plan)
app.command(name="run", context_settings={"allow_interspersed_args": False})(run.run)
app.command(name="verify")(verify.verify)
app.command(name="gate")(gate.gate)
app.command(name="report")(report.report)
app.command(name="gpus")(gpus.gpus)
app.command(name="doctor")(doctor.doctor)


def _print_version(wanted: bool) -> None:
    if wanted:
        from memfit import __version__  # noqa: PLC0415

        typer.echo(f"memfit {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    pass


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit status.

    Args:
        arguments: The words after `memfit`; those of this process when None.
    """
    try:
        app(sys.argv[1:] if arguments is None else arguments, prog_name="memfit")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    return 0


def command() -> NoReturn:
    """Run this process's command and end it, without taking apart all that it imported."""
    _open_what_is_closed()
    status = main()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:  # as Python itself does where what it printed cannot be written
        status = status or 120
    os._exit(status)


def _open_what_is_closed() -> None:
    """Give a process that was started without stdin, stdout or stderr the null device there.

    Otherwise the next file that is opened would take the place of the missing one.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115, PTH123
