"""`memfit gate`: does a change make training need more memory?"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from memfit.cli.manners import stderr, stdout, verb
from memfit.cli.probe import parse_settings
from memfit.errors import UsageError
from memfit.records import Precision

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rich.console import Console

    from memfit.gate import Comparison, Figure, GateResult, Limits
    from memfit.gate_run import GateRequest, NewSettings, Updated

_SHOWN_CHANGES = 10
_SHOWN_SUSPECTS = 3
_STATUS = {"error": 4, "not comparable": 5}


@verb
def gate(
    targets: Annotated[
        list[str] | None,
        typer.Argument(
            help="Workloads: file.py, file.py:Name or package.module:Name. All of the baseline "
            "when none is named. With --update, a probe's memfit.json too.",
            show_default=False,
        ),
    ] = None,
    baseline: Annotated[
        Path, typer.Option(help="The committed file that is compared with.")
    ] = Path("memfit-baseline.json"),
    update: Annotated[
        bool, typer.Option("--update", help="Measure anew and write the baseline.")
    ] = False,
    max_increase: Annotated[
        str, typer.Option(metavar="PERCENT", help="Fail above this increase of a peak,")
    ] = "2%",
    min_delta: Annotated[
        str, typer.Option(metavar="SIZE", help="when it is more than this too.")
    ] = "16MiB",
    limit: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Fail when a device uses more than this in all."),
    ] = None,
    fits_on: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CARD",
            help="Fail unless the same group fits on this card too; may be repeated.",
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="With --update: set a parameter."),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(help="With --update: cuda, cpu, or a card to imitate (see `memfit gpus`)."),
    ] = None,
    precision: Annotated[
        Precision | None, typer.Option(help="With --update: float32, or autocast.")
    ] = None,
    microbatch: Annotated[
        int | None, typer.Option("--microbatch", "-m", help="With --update: examples of one pass.")
    ] = None,
    accumulation_steps: Annotated[
        int | None,
        typer.Option("--accumulation-steps", "-A", help="With --update: microbatches of a group."),
    ] = None,
    replicas: Annotated[
        int | None,
        typer.Option("--replicas", "-D", help="With --update: data-parallel replicas."),
    ] = None,
    clip: Annotated[
        float | None, typer.Option(metavar="NORM", help="With --update: clip the whole gradient.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the whole result as JSON instead of a table.")
    ] = False,
    markdown: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the result as Markdown.")
    ] = None,
    junit: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the result as JUnit XML.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Tell no progress.")] = False,
) -> None:
    """Fail when training needs more memory than the committed baseline says.

    Runs each workload at its baseline's fixed size on its baseline's device, and says what grew,
    by category, module and line. A check never writes the baseline; --update does nothing else.
    """
    from memfit.gate_run import GateRequest, NewSettings  # noqa: PLC0415

    new = NewSettings(
        parameters=parse_settings(settings or []),
        device=device,
        precision=precision,
        microbatch=microbatch,
        accumulation_steps=accumulation_steps,
        replicas=replicas,
        clip_norm=clip,
    )
    request = GateRequest(
        targets=tuple(targets or ()),
        baseline=baseline,
        limits=_limits(max_increase, min_delta, limit),
        fits_on=tuple(fits_on or ()),
    )
    if update:
        if markdown or junit:
            raise UsageError("--markdown and --junit tell of a check, and --update makes none")
        _update(request, new, as_json=as_json, quiet=quiet)
        return
    if new != NewSettings():
        raise UsageError(
            "--set, --device, --precision and sizes are for --update: a check runs each workload "
            "as its baseline did",
            hint=f"add --update to write them into {baseline}",
        )
    for path in (markdown, junit):
        if path is not None and not path.parent.is_dir():
            raise UsageError(f"there is no folder {path.parent} for {path.name}")
    _check(request, markdown=markdown, junit=junit, as_json=as_json, quiet=quiet)


def _limits(max_increase: str, min_delta: str, limit: str | None) -> Limits:
    from memfit.gate import Limits  # noqa: PLC0415
    from memfit.units import parse_bytes  # noqa: PLC0415

    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", max_increase)
    if match is None:
        raise UsageError(f"--max-increase {max_increase} is not a percentage", hint="as in 2%")
    return Limits(
        max_increase=float(match[1]) / 100,
        min_delta_bytes=parse_bytes(min_delta),
        limit_bytes=None if limit is None else parse_bytes(limit),
    )


def _check(
    request: GateRequest, *, markdown: Path | None, junit: Path | None, as_json: bool, quiet: bool
) -> None:
    from memfit.export import gate as export  # noqa: PLC0415
    from memfit.folder import write_whole  # noqa: PLC0415
    from memfit.gate_run import check  # noqa: PLC0415
    from memfit.records import to_json  # noqa: PLC0415

    result = check(request, _teller(quiet=quiet))
    if as_json:
        sys.stdout.write(to_json(result).decode())
    else:
        _print(result, stdout())
    if markdown is not None:
        write_whole(markdown, export.markdown(result).encode())
    if junit is not None:
        write_whole(junit, export.junit(result).encode())
    summary = os.environ.get("GITHUB_STEP_SUMMARY")
    if summary:
        with Path(summary).open("a", encoding="utf-8") as stream:
            stream.write(export.markdown(result) + "\n")
    if os.environ.get("GITHUB_ACTIONS") == "true":
        # Workflow commands are read on both streams, and stdout is the answer's.
        for line in export.github(result):
            sys.stderr.write(f"{line}\n")
    sys.stdout.flush()
    status = _status(result)
    if status:
        raise typer.Exit(status)


def _status(result: GateResult) -> int:
    """What failed outweighs what could not be judged."""
    codes = [_STATUS.get(c.verdict, 1) for c in result.workloads if c.fails]
    return min(codes, default=0)


def _teller(*, quiet: bool) -> Callable[[str], None]:
    console = stderr()

    def tell(sentence: str) -> None:
        if not quiet:
            console.print(sentence, markup=False, soft_wrap=True)

    return tell


def _print(result: GateResult, console: Console) -> None:
    from memfit.export import gate as export  # noqa: PLC0415

    for comparison in result.workloads:
        _print_comparison(comparison, console)
    console.print()
    console.print(export.sentence(result), markup=False, soft_wrap=True)
    if not result.passed:
        console.print(export.limits_words(result), markup=False, soft_wrap=True)


def _print_comparison(comparison: Comparison, console: Console) -> None:
    for line in _lines(comparison):
        console.print(line, markup=False, soft_wrap=True)


def _lines(comparison: Comparison) -> Iterator[str]:
    """Tell one workload, line by line."""
    virtual = ", virtual" if comparison.source == "virtual" else ""
    group = ""
    if comparison.microbatch:
        group = f" ({comparison.microbatch} × {comparison.accumulation_steps})"  # noqa: RUF001
    yield f"{comparison.mark} {comparison.name}{group}{virtual}"
    several = len({(f.rank, f.device) for f in comparison.figures}) > 1
    for figure in comparison.figures:
        if figure.phase == "peak" or comparison.verdict != "same":
            yield f"  {figure.mark} {_figure_words(figure, several=several)}"
    for fit in comparison.fits:
        yield f"  {fit.mark} {'fits' if fit.now else 'does not fit'} on {fit.card}"
    for reason in comparison.reasons:
        yield f"    {reason}"
    yield from _change_lines(comparison)


def _change_lines(comparison: Comparison) -> Iterator[str]:
    """Tell what changed in one workload."""
    from memfit.export import gate as export  # noqa: PLC0415

    if comparison.changes and comparison.explained:
        yield f"    what changed at the peak of {comparison.explained.replace('_', ' ')}:"
    for change in comparison.changes[:_SHOWN_CHANGES]:
        text = f"  {change.text}" if change.text else ""
        yield f"      {export.change_words(change)}{text}"
    rest = comparison.changes[_SHOWN_CHANGES:]
    if rest:
        left = export.delta_words(sum(change.bytes for change in rest))
        yield f"      {left} in {len(rest)} other places"
    if comparison.suspects:
        yield "    lines that held nothing before:"
    for change in comparison.suspects[:_SHOWN_SUSPECTS]:
        grown = f"{export.delta_words(change.bytes)} {change.category}"
        yield f"      {change.place}  {change.text}  ({grown})"


def _figure_words(figure: Figure, *, several: bool) -> str:
    from memfit.export import gate as export  # noqa: PLC0415

    name = f"{export.phase_words(figure, several=several):<15}"
    if figure.allocated_bytes[1] is None:
        return f"{name} in use {export.pair_words(figure.used_bytes)}"
    return (
        f"{name} allocated {export.pair_words(figure.allocated_bytes)}"
        f"; reserved {export.pair_words(figure.reserved_bytes)}"
        f"; device used {export.pair_words(figure.used_bytes)}"
    )


def _update(request: GateRequest, new: NewSettings, *, as_json: bool, quiet: bool) -> None:
    from memfit.gate_run import update  # noqa: PLC0415

    updated = update(request, new, _teller(quiet=quiet))
    if as_json:
        from memfit.baseline import Baseline, encode  # noqa: PLC0415

        entries = {u.now.setting.name: u.now for u in updated}
        sys.stdout.write(encode(Baseline(entries=entries)).decode())
        return
    _print_update(updated, request.baseline, stdout())


def _print_update(updated: Sequence[Updated], path: Path, console: Console) -> None:
    from memfit.export import gate as export  # noqa: PLC0415
    from memfit.gate import Limits, differences_of, figures_of  # noqa: PLC0415

    for item in updated:
        before, now = item.before, item.now
        setting = now.setting
        group = f"({setting.microbatch} × {setting.accumulation_steps})"  # noqa: RUF001
        figures = figures_of(before or now, now, Limits())
        peak = next(f for f in figures if f.phase == "peak")
        pair = peak.allocated_bytes if peak.allocated_bytes[1] is not None else peak.used_bytes
        new = "new: " if before is None else ""
        virtual = ", virtual" if now.source == "virtual" else ""
        console.print(
            f"{setting.name} {group}: {new}{export.pair_words(pair)}{virtual}",
            markup=False,
            soft_wrap=True,
        )
        for difference in differences_of(before or now, now):
            console.print(
                f"    {difference.field}: {difference.before} → {difference.now}",
                markup=False,
                soft_wrap=True,
            )
    console.print(f"wrote {path}", markup=False, soft_wrap=True)
