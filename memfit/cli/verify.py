"""`memfit verify`: does accumulation reproduce the logical batch?"""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from memfit.cli.manners import stderr, stdout, verb
from memfit.cli.probe import parse_settings
from memfit.errors import CannotJudge, UsageError
from memfit.verification import Outcome

if TYPE_CHECKING:
    from memfit.records import ProbeResult
    from memfit.verification import Verification

_STATUS = {Outcome.EQUAL: 0, Outcome.DIFFERENT: 1, Outcome.UNKNOWN: CannotJudge.exit_code}


@verb
def verify(
    target: Annotated[
        str | None,
        typer.Argument(
            help="A workload (file.py, file.py:Name or package.module:Name), or with --script a "
            "training script."
        ),
    ] = None,
    arguments: Annotated[
        list[str] | None, typer.Argument(help="Words of the script, after --.")
    ] = None,
    script: Annotated[
        bool,
        typer.Option("--script", help="Run the target as a training script and watch its loop."),
    ] = False,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="NAME=VALUE", help="Set a parameter of the workload; scales it down."
        ),
    ] = None,
    full_size: Annotated[
        bool,
        typer.Option("--full-size", help="Leave out the workload's own verify_with."),
    ] = False,
    logical_batch: Annotated[
        int | None,
        typer.Option(
            "--logical-batch",
            "-B",
            help="Examples of the physical batch; 8, or 3 where those take long.",
        ),
    ] = None,
    microbatch: Annotated[
        int | None,
        typer.Option("--microbatch", "-m", help="Examples of a microbatch; a quarter of B."),
    ] = None,
    replicas: Annotated[
        int,
        typer.Option("--replicas", "-D", help="Also compare this many real processes over gloo."),
    ] = 1,
    device: Annotated[str, typer.Option(help="cpu or cuda; never a virtual GPU.")] = "cpu",
    accept: Annotated[
        list[str] | None,
        typer.Option(metavar="CODE", help="A finding that is known and does not decide."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**31, help="Seed of torch's generators.")] = 0,
    watch: Annotated[
        float, typer.Option(min=1, metavar="SECONDS", help="Longest time that a loop is watched.")
    ] = 120.0,
    out: Annotated[Path | None, typer.Option(help="Also write the record to this file.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace that file.")] = False,
    into: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Add the record to a probe of the same file, and its page."
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the whole record as JSON instead of words.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Tell no progress.")] = False,
    explain: Annotated[
        str | None,
        typer.Option(metavar="CODE", help="Print the page of a finding, such as MF203; or `all`."),
    ] = None,
) -> None:
    """Check that accumulated microbatches train what the logical batch would.

    Compares gradients and one optimizer step on real numbers, with the workload's own model,
    batch, loss, count and optimizer. Exit status 0 when equal, 1 when not, 5 when unknown.
    """
    if explain is not None:
        from memfit.cli.verified import render_pages  # noqa: PLC0415

        render_pages(explain, stdout())
        return
    if target is None:
        raise UsageError("there is nothing to verify", hint="name a workload, or use --explain")
    if arguments and not script:
        raise UsageError(
            f"{arguments[0]!r} is one word too many", hint="words of a script need --script"
        )
    if out is not None and out.exists() and not force:
        raise UsageError(f"{out} exists", hint="use --force to replace it")
    if out is not None and not out.parent.is_dir():
        raise UsageError(f"there is no folder {out.parent}", hint="make it, or name another file")
    probed = _probe_in(into) if into is not None else None
    from memfit.cli.verified import Telling, render_verification  # noqa: PLC0415
    from memfit.folder import write_whole  # noqa: PLC0415
    from memfit.records import to_json  # noqa: PLC0415
    from memfit.verify.run import VerifyRequest, run_verify  # noqa: PLC0415
    from memfit.verify.store import keep  # noqa: PLC0415

    request = VerifyRequest(
        target=target,
        script=script,
        arguments=arguments or (),
        parameters=parse_settings(settings or []),
        full_size=full_size,
        logical_batch=logical_batch,
        microbatch=microbatch,
        replicas=replicas,
        device=device,
        seed=seed,
        accept=accept or (),
        watch_s=watch,
        command=shlex.join(["memfit", *sys.argv[1:]]),
    )
    with Telling(stderr(), quiet=quiet) as telling:
        made = run_verify(request, telling)
    if not script:
        keep(made)
    if out is not None:
        write_whole(out, to_json(made))
    if probed is not None and into is not None:
        _add(made, probed, into)
    if as_json:
        sys.stdout.write(to_json(made).decode())
        sys.stdout.flush()
    else:
        render_verification(made, stdout())
    raise typer.Exit(_status(made))


def _probe_in(folder: Path) -> ProbeResult:
    from memfit.folder import RESULT  # noqa: PLC0415
    from memfit.records import ProbeResult, from_json  # noqa: PLC0415

    path = folder / RESULT
    try:
        return from_json(path.read_bytes(), ProbeResult, origin=str(path))
    except OSError as error:
        raise UsageError(
            f"cannot read {path}: {error.strerror}", hint="name the folder of a probe with --into"
        ) from None


def _add(made: Verification, probed: ProbeResult, folder: Path) -> None:
    """Put a verification into the record and on the page of a probe of the same file."""
    from memfit.folder import REPORT, RESULT, write_whole  # noqa: PLC0415
    from memfit.records import to_json  # noqa: PLC0415
    from memfit.report import render  # noqa: PLC0415

    if made.sha256 is None or made.sha256 != probed.workload.sha256:
        raise UsageError(
            f"{folder} holds a probe of another file than {made.target} as it is now",
            hint="probe again, or leave --into out",
        )
    result = replace(probed, verification=made)
    write_whole(folder / RESULT, to_json(result))
    write_whole(folder / REPORT, render(result).encode())


def _status(made: Verification) -> int:
    return _STATUS[made.outcome]
