"""`memfit run`: any program on a virtual card, and what its processes did to it."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from memfit.cli.manners import stderr, verb, write_json
from memfit.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console
    from rich.table import Table

    from memfit.records import RunError, RunProcess, RunResult

_MOMENTS = {
    "first_step_begins": "before optimizer step 1",
    "first_step_ends": "through optimizer step 1",
    "end": "to the end",
}
_PLACES = {
    "backward": "in backward",
    "optimizer_step": "in an optimizer step",
    "elsewhere": "outside backward and optimizer steps",
}
_MANY = 5
_WIDE = 110


@verb
def run(
    program: Annotated[
        list[str] | None,
        typer.Argument(metavar="PROGRAM", help="What to run, as in a shell."),
    ] = None,
    device: Annotated[
        str, typer.Option(help="The card to imitate, such as h100-80gb (see `memfit gpus`).")
    ] = "",
    memory_limit: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Make each device this small.")
    ] = None,
    devices: Annotated[int, typer.Option(metavar="N", help="How many of it there are.")] = 1,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Print the result as one JSON document on stdout; what the program prints there "
            "then goes to stderr.",
        ),
    ] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the JSON document to this file.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace that file.")] = False,
) -> None:
    """Run any program on a virtual card and tell the peaks of each process that used it.

    The program runs unmodified, with all the processes that it starts (torchrun, accelerate,
    multiprocessing); its stdin, stdout and stderr are memfit's own. When it has ended, a table
    of its peaks follows on stderr. The exit status is the program's own, 128 + n for signal n;
    2, 5 and 70 may also be memfit's, with an `error:` line. Python processes started with -S, -E
    or -I are not observed.
    """
    from memfit.run import RunRequest, run_program  # noqa: PLC0415

    if not device:
        raise UsageError("no card is named", hint="as in --device h100-80gb; see `memfit gpus`")
    if out is not None:
        _refuse_to_lose(out, force=force)
    result = run_program(
        RunRequest(
            program=program or [],
            device=device,
            memory_limit=memory_limit,
            devices=devices,
            keep_stdout=as_json,
            command=shlex.join(["memfit", *sys.argv[1:]]),
        )
    )
    if out is not None:
        from memfit.folder import write_whole  # noqa: PLC0415
        from memfit.records import to_json  # noqa: PLC0415

        write_whole(out, to_json(result))
    if as_json:
        write_json(result)
    else:
        _render(result, stderr())
    raise typer.Exit(result.exit_status)


def _refuse_to_lose(out: Path, *, force: bool) -> None:
    if out.is_dir() or not out.absolute().parent.is_dir():
        wrong = f"{out} is a folder" if out.is_dir() else f"there is no folder {out.parent}"
        raise UsageError(wrong, hint="name a file in a folder that exists")
    if out.exists() and not force:
        raise UsageError(f"{out} exists", hint="use --force to replace it, or another --out")


def _render(result: RunResult, console: Console) -> None:
    """Print the table, a line for each process, and what the figures leave out."""
    from rich.text import Text  # noqa: PLC0415

    from memfit.report import words  # noqa: PLC0415

    if not console.is_terminal:
        console.width = max(console.width, _WIDE)
    count = f"{result.device_count} devices of " if result.device_count > 1 else ""
    limit = words.size(result.device.limit_bytes)
    took = words.duration(result.wall_s)
    console.print()
    console.print(
        Text(
            f"{shlex.join(result.program)} on {words.device(result.device)}: "
            f"{count}{limit} (virtual), {took}",
            style="bold",
        ),
        soft_wrap=True,
    )
    if not result.processes:
        console.print(Text(_unused(result)), soft_wrap=True)
        return
    console.print(_table(result))
    for process in result.processes:
        for line in _lines(process):
            console.print(Text(line), soft_wrap=True)
    console.print("limits:")
    for sentence in result.limits:
        console.print(Text(f"- {sentence}"), soft_wrap=True)


def _unused(result: RunResult) -> str:
    """Say why there are no figures; a process that is killed leaves none before its first step."""
    if result.signal is not None:
        return f"ended by {result.signal}, before any process told what it used (virtual)"
    if result.exit_status:
        return (
            f"no process of this program told of a use of the virtual device (exit status "
            f"{result.exit_status}); one that is killed before its first optimizer step tells none"
        )
    return "no process of this program used the virtual device"


def _table(result: RunResult) -> Table:
    from rich.table import Table  # noqa: PLC0415

    from memfit.report import words  # noqa: PLC0415

    table = Table(box=None, pad_edge=False)
    for name in ("process", "device", "peaks from the start"):
        table.add_column(name, no_wrap=True)
    for name in ("allocated", "reserved", "device used"):
        table.add_column(name, no_wrap=True, justify="right")
    for process in result.processes:
        for device in process.devices:
            for phase in device.phases:
                table.add_row(
                    _short(process),
                    f"virtual {device.device}",
                    _until(process, phase.until),
                    words.size(phase.peak_allocated_bytes),
                    words.size(phase.peak_reserved_bytes),
                    words.size(phase.device_used_bytes),
                )
    return table


def _until(process: RunProcess, moment: str) -> str:
    """Name the moment up to which figures are; a killed process tells only what it had written."""
    killed = process.signal is not None or (
        process.ending is None and process.exit_status is None and process.exception is None
    )
    return "as last written" if killed and moment == "end" else _MOMENTS[moment]


def _short(process: RunProcess) -> str:
    return f"pid {process.pid}" if process.rank is None else f"rank {process.rank}"


def _lines(process: RunProcess) -> Iterator[str]:
    """Say who a process was, how far it came and how it ended, and where memory ran out."""
    from memfit.report import words  # noqa: PLC0415

    who = [f"pid {process.pid}"] if process.rank is not None else []
    who.append(shlex.join([Path(process.program[0]).name, *process.program[1:]]))
    if process.name:
        who.append(process.name)
    retries = sum(device.alloc_retries or 0 for device in process.devices)
    yield (
        f"{_short(process)} ({', '.join(who)}): "
        f"{_steps(process)}, "
        f"{retries} allocator {'retry' if retries == 1 else 'retries'} (virtual), "
        f"{_ending(process)}"
    )
    for error in process.out_of_memory[:_MANY]:
        yield f"  {_error(error)}"
    more = process.out_of_memory_count - min(len(process.out_of_memory), _MANY)
    if more:
        yield f"  and {words.number(more, 'more out-of-memory error')} (virtual)"


def _steps(process: RunProcess) -> str:
    from memfit.report import words  # noqa: PLC0415

    done = process.optimizer_steps
    return words.number(done, "optimizer step") if done else "no optimizer step seen"


def _ending(process: RunProcess) -> str:
    if process.signal is not None:
        return f"ended by {process.signal}"
    status = "" if process.exit_status is None else f", exit status {process.exit_status}"
    if process.exception is not None:
        return f"ended by {process.exception}{status}"
    if process.ending is None and not status:
        return "killed or crashed: these are the last figures that it wrote"
    return f"ended by itself{status}"


def _error(error: RunError) -> str:
    from memfit.report import words  # noqa: PLC0415

    done = error.optimizer_steps
    when = f"after {words.number(done, 'optimizer step')}" if done else "before any optimizer step"
    return (
        f"out of memory on virtual device {error.device} {_PLACES[error.where]}, {when}: "
        f"{words.size(error.requested_bytes)} asked for, {words.size(error.free_bytes)} free, "
        f"{words.size(error.allocated_bytes)} allocated"
    )
