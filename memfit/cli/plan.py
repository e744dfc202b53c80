"""`memfit plan`: what fits where, before anything is rented."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from memfit.cli.manners import answer_saved, stderr, stdout, verb, write_json
from memfit.errors import CannotJudge, NothingFits, WorkloadError
from memfit.records import Policy

if TYPE_CHECKING:
    from memfit.capacity.folder import CapacityFolder
    from memfit.capacity.table import CapacityTable


@verb
def plan(
    target: Annotated[
        str, typer.Argument(help="A workload: file.py, file.py:Name or package.module:Name.")
    ],
    devices: Annotated[
        str,
        typer.Option(
            "--on",
            metavar="DEVICE,DEVICE",
            help="Cards to imitate (see `memfit gpus`), card files, or cpu; all is every card.",
        ),
    ] = "",
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="NAME=VALUE,VALUE", help="Set a parameter, to each of these in turn."
        ),
    ] = None,
    precision: Annotated[
        str, typer.Option(metavar="LIST", help="Any of fp32, bf16, fp16.")
    ] = "fp32",
    replicas: Annotated[
        str, typer.Option("--replicas", "-D", metavar="LIST", help="Data-parallel replicas.")
    ] = "1",
    logical_batch: Annotated[
        int | None,
        typer.Option("--logical-batch", "-B", help="Examples that one optimizer step consumes."),
    ] = None,
    need: Annotated[
        int | None,
        typer.Option(
            metavar="M",
            help="Find the smallest device, by memory, on which this microbatch fits; of all cards "
            "without --on.",
        ),
    ] = None,
    tries: Annotated[
        str,
        typer.Option(
            "--try",
            metavar="LIST",
            help="Measure what would buy room in every cell: checkpointing, allocator (expandable "
            "segments), precision (bf16), or NAME=VALUE of a parameter.",
        ),
    ] = "",
    policy: Annotated[
        Policy,
        typer.Option(help="exact: equal microbatches, m*A*D = B. ragged: as equal as possible."),
    ] = Policy.EXACT,
    memory_limit: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Use at most this much of each, such as 20GiB."),
    ] = None,
    headroom: Annotated[
        str, typer.Option(metavar="SIZE|PERCENT", help="Keep this much of each free.")
    ] = "2%",
    clip: Annotated[
        float | None, typer.Option(metavar="NORM", help="Clip the whole gradient once per group.")
    ] = None,
    group_microbatches: Annotated[
        int, typer.Option(help="Microbatches in a search trial's group; the answer runs them all.")
    ] = 2,
    min_microbatch: Annotated[int, typer.Option(help="Try no microbatch below this.")] = 1,
    max_microbatch: Annotated[
        int | None, typer.Option(help="Try no microbatch above this.")
    ] = None,
    max_trials: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Look for a cell's size in at most N trials, whatever the allocator's setting: by "
            "default 40, on a virtual GPU 400.",
        ),
    ] = None,
    time_budget: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS", help="Stop a cell's search after this, once it has an answer."
        ),
    ] = None,
    trial_timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="End a trial that takes longer.")
    ] = 1800.0,
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
    jobs: Annotated[
        int | None,
        typer.Option("--jobs", "-j", metavar="N", help="Cells at once; by default one a core."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for the table; by default reports/<workload>-capacity."),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace an earlier plan in that folder.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the whole table as JSON instead.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Tell no progress.")] = False,
) -> None:
    """Tell what fits where: a probe for every device and setting, in one table.

    Cells run side by side, each with a certificate and a folder of its own, and the folder gets
    capacity.json, capacity.csv and capacity.html. A plan that is interrupted goes on when the
    same command is run again. A cell in which nothing fits or the workload fails says so; the
    exit status is 4 or 5 where one could not be judged, and 3 where nothing fits at all (with
    --need: where a setting has no device).
    """
    from memfit.capacity.matrix import (  # noqa: PLC0415
        counts_of,
        parameter_lists,
        precisions_of,
        words_of,
    )
    from memfit.capacity.question import EVERY_CARD, PlanRequest  # noqa: PLC0415
    from memfit.capacity.run import run_plan  # noqa: PLC0415
    from memfit.cli.plan_progress import PlanTeller  # noqa: PLC0415

    asked = words_of("--on", devices or EVERY_CARD) if devices or need else ()
    request = PlanRequest(
        target=target,
        devices=asked,
        parameters=parameter_lists(settings or []),
        precisions=precisions_of(precision),
        replicas=counts_of("--replicas", replicas),
        tries=words_of("--try", tries) if tries else (),
        need=need,
        logical_batch=logical_batch,
        policy=policy,
        memory_limit=memory_limit,
        headroom=headroom,
        clip_norm=clip,
        group_microbatches=group_microbatches,
        min_microbatch=min_microbatch,
        max_microbatch=max_microbatch,
        max_trials=max_trials,
        time_budget_s=time_budget,
        trial_timeout_s=trial_timeout,
        seed=seed,
        data_dependent=data_dependent,
        jobs=jobs,
        out=out,
        force=force,
        command=shlex.join(["memfit", *sys.argv[1:]]),
    )
    teller = PlanTeller(stderr(), quiet=quiet)
    try:
        table, folder = run_plan(request, teller)
    finally:
        teller.close()
    try:
        _write_pages(table, folder)
    finally:  # a disk that is full is no reason to keep the answer back
        _print(table, as_json=as_json)
    if not quiet:
        from memfit.capacity.folder import PAGE  # noqa: PLC0415

        stderr().print(f"wrote {folder.path / PAGE}", soft_wrap=True)
    status = exit_status(table)
    if status:
        raise typer.Exit(status)


def exit_status(table: CapacityTable) -> int:
    """Say what a script should know: whether every cell was judged, and whether anything fits."""
    from memfit.capacity.table import CellStatus  # noqa: PLC0415

    found = {cell.status for cell in table.matrix}
    if CellStatus.FAILED in found:
        return WorkloadError.exit_code
    if CellStatus.CANNOT_JUDGE in found:
        return CannotJudge.exit_code
    if table.needed:
        lacking = any(need.device is None for need in table.needed)
        return NothingFits.exit_code if lacking else 0
    return 0 if CellStatus.FITS in found else NothingFits.exit_code


def _print(table: CapacityTable, *, as_json: bool) -> None:
    if as_json:
        write_json(table)
    else:
        from memfit.cli.plan_answer import render_plan  # noqa: PLC0415

        render_plan(table, stdout())


def _write_pages(table: CapacityTable, folder: CapacityFolder) -> None:
    from memfit.capacity.folder import CELLS, PAGE, TABLE  # noqa: PLC0415
    from memfit.export.capacity import capacity_csv  # noqa: PLC0415
    from memfit.report import render_capacity  # noqa: PLC0415

    with answer_saved(folder.path / TABLE):
        folder.write(CELLS, capacity_csv(table).encode())
        folder.write(PAGE, render_capacity(table).encode())
