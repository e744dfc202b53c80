"""`memfit probe`: the largest microbatch, end to end."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from memfit.allocator import AllocatorChoice
from memfit.cli.manners import answer_saved, stderr, stdout, verb, write_json
from memfit.errors import UsageError
from memfit.records import Policy, Precision

if TYPE_CHECKING:
    from collections.abc import Callable

    from memfit.folder import ProbeFolder
    from memfit.nothing import NothingFound
    from memfit.probe import Unfit
    from memfit.records import ProbeResult


@verb
def probe(
    target: Annotated[
        str, typer.Argument(help="A workload: file.py, file.py:Name or package.module:Name.")
    ],
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Set a parameter of the workload."),
    ] = None,
    device: Annotated[
        str,
        typer.Option(
            help="auto, cuda, cpu, or a card to imitate: its name (see `memfit gpus`) or a card "
            "file. auto is this machine's GPU, else a virtual GPU, else the CPU."
        ),
    ] = "auto",
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Give a virtual GPU this much memory, more or less than its card."
        ),
    ] = None,
    memory_limit: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Use at most this much, such as 20GiB.")
    ] = None,
    headroom: Annotated[
        str, typer.Option(metavar="SIZE|PERCENT", help="Keep this much of it free.")
    ] = "2%",
    logical_batch: Annotated[
        int | None,
        typer.Option("--logical-batch", "-B", help="Examples that one optimizer step consumes."),
    ] = None,
    replicas: Annotated[int, typer.Option("--replicas", "-D", help="Data-parallel replicas.")] = 1,
    policy: Annotated[
        Policy,
        typer.Option(help="exact: equal microbatches, m*A*D = B. ragged: as equal as possible."),
    ] = Policy.EXACT,
    precision: Annotated[
        Precision, typer.Option(help="Plain float32, or autocast (fp16 with a scaler).")
    ] = Precision.FP32,
    clip: Annotated[
        float | None, typer.Option(metavar="NORM", help="Clip the whole gradient once per group.")
    ] = None,
    group_microbatches: Annotated[
        int, typer.Option(help="Microbatches in a search trial's group; the answer runs them all.")
    ] = 2,
    allocator: Annotated[
        AllocatorChoice,
        typer.Option(
            help="Settings of PyTorch's allocator to try: the environment's, expandable segments, "
            "or both. auto is both on a virtual GPU."
        ),
    ] = AllocatorChoice.AUTO,
    resumed: Annotated[
        bool,
        typer.Option("--resumed", help="Start with the optimizer's state, as from a checkpoint."),
    ] = False,
    evaluate: Annotated[
        bool,
        typer.Option(
            "--evaluate", help="Run an evaluation pass as well; it never changes the answer."
        ),
    ] = False,
    groups: Annotated[
        int,
        typer.Option(help="Groups that a trial of full groups runs; a growth shows from 3 on."),
    ] = 3,
    min_microbatch: Annotated[int, typer.Option(help="Try no microbatch below this.")] = 1,
    max_microbatch: Annotated[
        int | None, typer.Option(help="Try no microbatch above this.")
    ] = None,
    max_trials: Annotated[
        int | None,
        typer.Option(
            help="Look for the size in at most this many trials, whatever the allocator's setting: "
            "by default 40, on a virtual GPU 400."
        ),
    ] = None,
    time_budget: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS", help="Stop the search after this, once there is an answer."
        ),
    ] = None,
    trial_timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="End a trial that takes longer.")
    ] = 1800.0,
    one_at_a_time: Annotated[
        bool,
        typer.Option(
            "--one-at-a-time",
            help="Never run two trials at once, as is done on a virtual GPU where cores allow it.",
        ),
    ] = False,
    seed: Annotated[
        int,
        typer.Option(min=0, max=2**63 - 1, help="Seed of torch's generators in every trial."),
    ] = 0,
    data_dependent: Annotated[
        str,
        typer.Option(
            metavar="worst|none|SHARE",
            help="On a virtual GPU, how much of a mask with unknown values counts: all, none, or a "
            "share such as 0.3.",
        ),
    ] = "worst",
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the result; by default reports/<workload>-<device>, followed by the "
            "precision and the parameters that were set."
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace an earlier result in that folder.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the whole result as JSON instead of a table.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Tell no progress.")] = False,
) -> None:
    """Find the largest microbatch that really trains, and the accumulation steps around it.

    Runs full accumulation groups at growing sizes, each in a process of its own, and writes
    memfit.json, trials.csv and report.html. An interrupted probe goes on when the same command
    is run again.
    """
    from memfit.cli.progress import ProgressTeller  # noqa: PLC0415
    from memfit.probe import ProbeRequest, Unfit, UnsavedAnswer, run_probe  # noqa: PLC0415
    from memfit.report import render  # noqa: PLC0415

    request = ProbeRequest(
        target=target,
        parameters=parse_settings(settings or []),
        device=device,
        memory=memory,
        memory_limit=memory_limit,
        headroom=headroom,
        logical_batch=logical_batch,
        replicas=replicas,
        policy=policy,
        precision=precision,
        clip_norm=clip,
        group_microbatches=group_microbatches,
        groups=groups,
        allocator=allocator,
        resumed=resumed,
        evaluate=evaluate,
        side_by_side=not one_at_a_time,
        min_microbatch=min_microbatch,
        max_microbatch=max_microbatch,
        max_trials=max_trials,
        time_budget_s=time_budget,
        trial_timeout_s=trial_timeout,
        seed=seed,
        data_dependent=data_dependent,
        out=out,
        force=force,
        command=shlex.join(["memfit", *sys.argv[1:]]),
    )
    teller = ProgressTeller(stderr(), quiet=quiet)
    try:
        result, folder = run_probe(request, teller)
    except Unfit as none:
        teller.close()
        _keep_nothing(none, as_json=as_json, quiet=quiet)
        raise
    except UnsavedAnswer as unsaved:
        teller.close()
        _print(unsaved.result, as_json=as_json)
        raise
    finally:
        teller.close()
    try:
        _write_pages(result, folder, lambda: render(result, teller.charts()))
    finally:  # a disk that is full is no reason to keep the answer back
        _print(result, as_json=as_json)
    _tell_page(folder, quiet=quiet)


def parse_settings(settings: list[str]) -> dict[str, str]:
    """Read what the `--set` options say."""
    values: dict[str, str] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals or not name:
            raise UsageError(f"--set {setting} is not NAME=VALUE", hint="as in --set seq_len=2048")
        if name in values:
            raise UsageError(f"--set {name} is given twice", hint="give each parameter once")
        values[name] = value
    return values


def _print(result: ProbeResult, *, as_json: bool) -> None:
    if as_json:
        write_json(result)
    else:
        from memfit.cli.answer import render_answer  # noqa: PLC0415

        render_answer(result, stdout())


def _keep_nothing(none: Unfit, *, as_json: bool, quiet: bool) -> None:
    """Write the pages of a probe in which nothing fits; the error itself is told by the verb."""
    from memfit.report import render_nothing  # noqa: PLC0415

    folder = none.folder
    try:
        if folder is not None:
            _write_pages(none.record, folder, lambda: render_nothing(none.record))
    finally:
        if as_json:
            write_json(none.record)
    if folder is not None:
        _tell_page(folder, quiet=quiet)


def _write_pages(
    record: ProbeResult | NothingFound, folder: ProbeFolder, page: Callable[[], str]
) -> None:
    from memfit.export.csv import trials_csv  # noqa: PLC0415
    from memfit.folder import REPORT, RESULT, TRIALS  # noqa: PLC0415

    with answer_saved(folder.path / RESULT):
        folder.write(TRIALS, trials_csv(record).encode())
        folder.write(REPORT, page().encode())


def _tell_page(folder: ProbeFolder, *, quiet: bool) -> None:
    from memfit.folder import REPORT  # noqa: PLC0415

    if not quiet:
        stderr().print(f"wrote {folder.path / REPORT}", soft_wrap=True)
