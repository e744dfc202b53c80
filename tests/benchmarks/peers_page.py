"""The page of `tests.benchmarks.peers`, from what its store holds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from memfit.units import format_bytes
from tests.benchmarks.cases import CASES, DESCRIPTIONS
from tests.benchmarks.peers import FINDERS, GROUPS, MEMFIT, PEERS, PHASES_OF, Run, Store, Truth
from tests.benchmarks.scan import holes


@dataclass(frozen=True, slots=True)
class Cell:
    """A finder on a workload: all its runs, and what became of its answer."""

    runs: Sequence[Run]
    truth: Truth | None
    survives: bool | None

    @property
    def answer(self) -> int | None:
        """The answer of the first run."""
        return self.runs[0].answer if self.runs else None

    @property
    def steady(self) -> bool:
        """Whether all runs tried the same sizes and answered the same."""
        return len({(run.answer, run.sizes) for run in self.runs}) <= 1

    @property
    def right(self) -> bool:
        """Whether the answer is the largest size that fits, and survives."""
        largest = self.truth.largest if self.truth else None
        return self.answer is not None and self.answer == largest and bool(self.survives)

    @property
    def seconds(self) -> float:
        """Median of whole processes."""
        return statistics.median(run.wall_s for run in self.runs)

    @property
    def spread(self) -> str:
        """Median and range, in words."""
        seconds = [run.wall_s for run in self.runs]
        return f"{self.seconds:.1f} ({min(seconds):.1f} to {max(seconds):.1f})"


Grid = dict[str, dict[str, Cell]]


def grid_of(store: Store, cases: Sequence[str]) -> Grid:
    """Return every finder on every workload that was run."""

    def cell(case: str, finder: str) -> Cell:
        runs = store.runs(case, finder)
        fate = store.survival(case, runs[0].answer) if runs else None
        return Cell(runs, store.truth(case), fate.survives if fate else None)

    whole = {case: {finder: cell(case, finder) for finder in FINDERS} for case in cases}
    return {case: row for case, row in whole.items() if all(c.runs for c in row.values())}


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """Write a table in Markdown, its header first."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    lines.insert(1, "|" + "---|" * len(rows[0]))
    return "\n".join(lines)


def _by_finder(grid: Grid, tell: Callable[[Cell], str]) -> str:
    rows = [["workload", *FINDERS]]
    rows += [[case, *(tell(row[f]) for f in FINDERS)] for case, row in grid.items()]
    return markdown_table(rows)


def _answer(cell: Cell) -> str:
    run = cell.runs[0]
    if run.failure is not None:
        return f"failed: {run.failure[:80]}"
    if cell.right:
        return f"**{cell.answer}**"
    largest = cell.truth.largest if cell.truth else None
    if largest is None or cell.answer is None:
        return str(cell.answer)
    if not cell.survives:
        return f"{cell.answer}, does not survive"
    return f"{cell.answer} ({(cell.answer - largest) / largest:+.0%})"


def ratio(row: dict[str, Cell], *, right_only: bool = False) -> float | None:
    """Return memfit's time as a part of that of the quickest other finder."""
    others = [row[f] for f in PEERS if row[f].answer is not None]
    others = [cell for cell in others if cell.right or not right_only]
    return row[MEMFIT].seconds / min(c.seconds for c in others) if others else None


def _short(grid: Grid) -> str:
    lines = []
    for finder in FINDERS:
        right = sum(row[finder].right for row in grid.values())
        lines.append(f"- {finder}: right on {right} of {len(grid)}.")
    for right_only, words in ((False, "the quickest other finder"), (True, "one that is right")):
        found = [r for row in grid.values() if (r := ratio(row, right_only=right_only))]
        if found:
            lines.append(
                f"- memfit's time as a part of that of {words}: {statistics.median(found):.0%} on "
                f"the median ({min(found):.0%} to {max(found):.0%}, {len(found)} workloads)."
            )
    return "\n".join(lines)


def _questions(grid: Grid) -> str:
    rows = [
        ["workload", "what it is", "card", "limit", "largest that fits", "sizes tried", "holes"]
    ]
    for case, row in grid.items():
        truth = row[MEMFIT].truth
        rows.append(
            [
                case,
                DESCRIPTIONS[case],
                f"{CASES[case].card}, virtual",
                format_bytes(truth.limit_bytes) if truth else "-",
                f"**{truth.largest}**" if truth else "-",
                str(len(truth.rows)) if truth else "-",
                (", ".join(map(str, holes(truth.rows))) or "none") if truth else "-",
            ]
        )
    return markdown_table(rows)


def _tried(cell: Cell) -> str:
    run = cell.runs[0]
    pairs = zip(run.sizes, run.fitted, strict=True)
    return ", ".join(str(size) if fits else f"({size})" for size, fits in pairs)


def _phases(store: Store) -> str:
    runs = store.phases()
    names = list(dict.fromkeys(name for run in runs for name in run))
    seconds = {n: statistics.median(run.get(n, 0.0) for run in runs) for n in names}
    whole = statistics.median(sum(run.values()) for run in runs)
    rows = [["step", "seconds", "share"]]
    rows += [[name, f"{s:.2f}", f"{s / whole:.0%}"] for name, s in seconds.items()]
    return markdown_table([*rows, ["whole process", f"{whole:.2f}", "100%"]])


def _unsteady(grid: Grid) -> str:
    names = [f"{f} on {c}" for c, row in grid.items() for f, cell in row.items() if not cell.steady]
    if not names:
        return "All runs of a finder on a workload tried the same sizes and gave the same answer."
    return f"Runs differed in what they tried or answered: {', '.join(names)}; the first is shown."


def page(store: Store, cases: Sequence[str], *, command: str) -> str:
    """Write the page."""
    grid = grid_of(store, cases)
    machine = store.machine
    if not grid or machine is None:
        return "No workload has been run by every finder yet.\n"
    repeats = min(len(cell.runs) for row in grid.values() for cell in row.values())
    phases = ""
    if runs := store.phases():
        phases = f"""
## Where a probe's time goes

The probe of the {PHASES_OF}, the median of {len(runs)} runs of
`python -m tests.benchmarks.phases`:

{_phases(store)}
"""
    return f"""\
# Speed: memfit beside other batch size finders

{len(grid)} workloads, each on a **virtual** card that it nearly fills. Every finder ran on that
same card, as a whole process, in turns with the others. The question is the largest microbatch
that trains with gradient accumulation.

{_short(grid)}

## Answers

Bold is right: the largest size that fits, as found by trying every size, and it ran {GROUPS} groups
in a fresh process. Beside wrong answers stands how far off they are.

{_by_finder(grid, _answer)}

## Seconds

Wall time from the start of the process to its end, imports and (for memfit) the report included:
the median of {repeats} runs, and their range.

{_by_finder(grid, lambda cell: cell.spread)}

## Trials

Sizes tried, failed ones included. Each of memfit's is a process of its own.

{_by_finder(grid, lambda cell: str(len(cell.runs[0].sizes)))}

## The truth

{_questions(grid)}

Sizes were tried one by one, each in two groups in a fresh process, up to three in a row whose need
alone is above the limit. A *hole* is a size that fails below one that fits. Longer searches for
holes are in [every size tried](speed/exhaustive.md) and [survival](survival.md).

{_unsteady(grid)}
{phases}
Building the virtual GPU's driver took {machine.build_s:.1f} s. That happens once per installation
and is in none of the times above: the cache was warm.

## What was tried

Sizes in order, those that failed in brackets.

{_by_finder(grid, _tried)}

## What is virtual, and what each finder was given

- No kernel is executed. PyTorch's CUDA build, autograd, optimizer and caching allocator run as on a
  card; values in tensors mean nothing. So times here are host time: process starts, imports, trials
  without their arithmetic. They compare finders with each other; they are not times on a real GPU.
- Lightning: `Tuner.scale_batch_size` with its defaults (`init_val=2`, `steps_per_trial=3`,
  `max_trials=25`, `max_val=8192`, `margin=0.05` in binsearch) around the same model, loss and
  optimizer, the matching `precision`, `accumulate_grad_batches=2`, without logger, checkpoints,
  progress bar and model summary. Its margin of 5 % of the *size* is headroom of its own on top of
  the limit.
- accelerate: `find_executable_batch_size` with its defaults (from 128 down, times 0.9) around a
  loop of two groups of two microbatches, the matching `mixed_precision`,
  `gradient_accumulation_steps=2`. Its own wrapper returns the outputs in float32.
- Both build the model on the device, as a memfit trial does. A finder that takes half of the
  machine's memory, or ten minutes, is ended and has failed: Lightning's tuner first saves a
  checkpoint of the model, which for 7B parameters is put together in host memory.
- memfit: `memfit probe` with its defaults, but for `--allocator default`: by itself it would also
  tell what another setting of the allocator allows, which nobody else is asked. The limit is the
  card less its headroom of 2 %, and the others' card has just that much.
- The card is deterministic; the load average was {machine.load:.1f} when the measurement began.

{machine.versions}.

Regenerate with

```
pip install -e '.[bench]'
{command}
```
"""
