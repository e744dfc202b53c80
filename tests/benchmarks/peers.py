"""memfit beside other batch size finders: time, trials and answers on one workload.

    pip install -e '.[bench]'
    python -m tests.benchmarks.peers --markdown reports/speed.md

Every finder runs as a whole process on the same virtual card with the same limit. Its answer is
then run by a full-group trial in a fresh process, and held against a scan of every size. Runs take
turns, so that a busy machine slows all of them alike.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import psutil

from memfit import virtual
from memfit.batch import UNSPLIT_ACCUMULATION_STEPS, candidates
from memfit.devices.select import choose, describe
from memfit.probe import worker_environment
from memfit.records import Policy, Precision, ProbeResult, Split, TrialResult, Verdict, from_json
from memfit.units import format_bytes
from tests.benchmarks.scan import Row, Scanner, Setting, holes, scanner

SETTING = Setting()
MEMFIT_EXACT = "memfit, logical batch"
MEMFIT_OPEN = "memfit"
PEERS = {
    "Lightning, power": "lightning-power",
    "Lightning, binsearch": "lightning-binsearch",
    "Lightning, binsearch, margin 0": "lightning-binsearch-margin-0",
    "accelerate": "accelerate",
}
FRESH = ("Lightning, power", "accelerate")
"""One finder for each loop, started once more with the largest size that fits."""
PACKAGES = ("memfit", "torch", "lightning", "accelerate")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One finder, once."""

    wall_s: float
    """From the start of the process to its end."""
    cpu_s: float
    """Processor time of it and its children."""
    answer: int | None
    failure: str | None
    sizes: tuple[int, ...]
    """Sizes in the order in which they were tried."""
    fitted: tuple[bool, ...]
    examples: int
    """Examples that went into a forward pass."""


@dataclass(slots=True, kw_only=True)
class Finder:
    """All runs of a finder, and what became of its answer."""

    name: str
    runs: list[Run] = field(default_factory=list)
    survives: bool | None = None
    """Whether the answer ran full groups in a fresh process."""
    keeps: bool | None = None
    """Whether equal microbatches of the answer make up the logical batch."""
    largest: bool | None = None
    """Whether it is the largest size that survives."""
    largest_exact: bool | None = None
    """Whether it is the largest one that keeps the logical batch."""

    @property
    def run(self) -> Run:
        """The first run; the virtual GPU gives the same answer every time, which is checked."""
        return self.runs[0]

    @property
    def steady(self) -> bool:
        """Whether all runs tried the same sizes and answered the same."""
        return len({(run.answer, run.sizes) for run in self.runs}) == 1

    def median(self, name: str) -> float:
        """Return the median over the runs."""
        return statistics.median(getattr(run, name) for run in self.runs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """What trying every size showed."""

    integers: tuple[Row, ...]
    """Every size, in groups of two microbatches."""
    divisors: tuple[Row, ...]
    """Every divisor of the logical batch, in full groups."""

    @property
    def largest(self) -> int | None:
        """The largest size that fits."""
        return _largest(self.integers)

    @property
    def largest_exact(self) -> int | None:
        """The largest size that fits and keeps the logical batch."""
        return _largest(self.divisors)


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """Everything that was measured."""

    finders: list[Finder]
    truth: Truth
    logical_batch: int
    limit_bytes: int
    build_s: float
    """Seconds of building the virtual GPU's driver, once per installation."""
    fresh: Mapping[str, bool]
    """Whether a peer's own loop runs the largest size that fits, when it starts with it."""
    imports: Mapping[str, float]
    """Seconds until the libraries were imported, by finder."""
    phases: Sequence[Mapping[str, Any]]
    load: tuple[float, float]
    """Load average of the machine before and after."""
    versions: str
    """The packages and the machine."""


def _largest(rows: Sequence[Row]) -> int | None:
    return max((row.microbatch for row in rows if row.fits), default=None)


# -- running -------------------------------------------------------------------------------------


def timed(
    command: Sequence[str], environment: Mapping[str, str]
) -> tuple[subprocess.CompletedProcess[str], float, float]:
    """Run a process to its end; return it, its seconds and its processor seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.monotonic()
    done = subprocess.run(
        command,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    wall = time.monotonic() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return done, wall, cpu


def run_memfit(folder: Path, logical_batch: int | None) -> Run:
    """Run `memfit probe` as its user does, report included."""
    out = folder / "probe"
    command = [sys.executable, "-m", "memfit", *probe_words(logical_batch), "--out", str(out)]
    done, wall, cpu = timed(command, {})
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}\n{done.stderr}")
    result = from_json((out / "memfit.json").read_bytes(), ProbeResult, origin="memfit.json")
    return Run(
        wall_s=wall,
        cpu_s=cpu,
        answer=result.split.microbatch,
        failure=None,
        sizes=tuple(trial.spec.split.microbatch for trial in result.trials),
        fitted=tuple(trial.verdict is Verdict.FITS for trial in result.trials),
        examples=sum(examples_of(trial) for trial in result.trials),
    )


def probe_words(logical_batch: int | None) -> list[str]:
    """Return the words of the `memfit probe` that is measured."""
    words = ["probe", SETTING.target, "--device", SETTING.card]
    words += ["--precision", SETTING.precision.value]
    return words if logical_batch is None else [*words, "--logical-batch", str(logical_batch)]


def examples_of(trial: TrialResult) -> int:
    """Count the examples that went into a forward pass."""
    sizes, evidence = trial.spec.sizes, trial.evidence
    if trial.verdict is Verdict.FITS or evidence.group is None:
        return trial.groups_run * sum(sizes)
    return (evidence.group - 1) * sum(sizes) + sum(sizes[: evidence.microbatch_index or len(sizes)])


def run_peer(
    folder: Path, finder: str, environment: Mapping[str, str], *, start: int | None = None
) -> tuple[Run, float]:
    """Run another finder; return also the seconds until its libraries were imported."""
    path = folder / "result.json"
    command = [sys.executable, "-m", "tests.benchmarks.finders", finder, SETTING.target]
    command += [] if start is None else ["--start", str(start)]
    done, wall, cpu = timed([*command, "--result", str(path)], environment)
    if done.returncode or not path.exists():
        raise SystemExit(f"{finder} ended with {done.returncode}\n{done.stderr[-3000:]}")
    said = json.loads(path.read_text())
    if said["total_bytes"] != int(environment["MEMFIT_VGPU_CARD"].split("total=")[1].split(";")[0]):
        raise SystemExit(f"{finder} ran on a device of {said['total_bytes']} bytes")
    run = Run(
        wall_s=wall,
        cpu_s=cpu,
        answer=said["answer"],
        failure=said["failure"],
        sizes=tuple(trial["size"] for trial in said["trials"]),
        fitted=tuple(trial["fits"] for trial in said["trials"]),
        examples=said["examples"],
    )
    return run, said["ready_s"]


def measure(logical_batch: int, repeats: int) -> Benchmark:
    """Run everything."""
    choice = choose(SETTING.card)
    device = describe(choice, memory_limit=SETTING.memory_limit, headroom=SETTING.headroom)
    build = build_seconds()
    environment = worker_environment(choice, device)
    finders = {name: Finder(name=name) for name in (MEMFIT_EXACT, MEMFIT_OPEN, *PEERS)}
    imports: dict[str, list[float]] = {}
    phases: list[dict[str, Any]] = []
    before = os.getloadavg()[0]
    for turn in range(repeats + 1):
        # The first turn warms the disk's cache and the byte code of all alike, and is not counted.
        for name, finder in finders.items():
            with tempfile.TemporaryDirectory(prefix="memfit-bench-") as made:
                folder = Path(made)
                if name in PEERS:
                    run, ready = run_peer(folder, PEERS[name], environment)
                    if turn:
                        imports.setdefault(name, []).append(ready)
                else:
                    run = run_memfit(folder, logical_batch if name == MEMFIT_EXACT else None)
            said = "warm-up" if not turn else f"run {turn} of {repeats}"
            print(f"{said}: {name}: {run.wall_s:.2f} s, {run.answer}", file=sys.stderr, flush=True)
            if turn:
                finder.runs.append(run)
        if turn:
            phases.append(run_phases(logical_batch))
    after = os.getloadavg()[0]
    with scanner(SETTING) as trials:
        truth = scan(trials, logical_batch)
        for finder in finders.values():
            judge(finder, trials, truth, logical_batch)
    fresh = {}
    for name in FRESH if truth.largest else ():
        with tempfile.TemporaryDirectory(prefix="memfit-bench-") as made:
            run, _ = run_peer(Path(made), PEERS[name], environment, start=truth.largest)
        fresh[name] = run.fitted[0]
    return Benchmark(
        finders=list(finders.values()),
        truth=truth,
        logical_batch=logical_batch,
        limit_bytes=device.limit_bytes,
        build_s=build,
        fresh=fresh,
        imports={name: statistics.median(seconds) for name, seconds in imports.items()},
        phases=phases,
        load=(before, after),
        versions=versions(),
    )


def build_seconds() -> float:
    """Build the driver into an empty cache and say how long it took."""
    kept = os.environ.get("MEMFIT_CACHE")
    card = virtual.find_card(SETTING.card)
    with tempfile.TemporaryDirectory(prefix="memfit-bench-") as cache:
        os.environ["MEMFIT_CACHE"] = cache
        began = time.monotonic()
        try:
            virtual.prepare(card, total_bytes=card.total_bytes)
        finally:
            del os.environ["MEMFIT_CACHE"]
            if kept is not None:
                os.environ["MEMFIT_CACHE"] = kept
        return time.monotonic() - began


def run_phases(logical_batch: int) -> dict[str, Any]:
    """Take a probe's own time apart, in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="memfit-bench-") as made:
        path = Path(made) / "phases.json"
        command = [sys.executable, "-m", "tests.benchmarks.phases", SETTING.target]
        command += ["--device", SETTING.card, "--precision", SETTING.precision.value]
        command += ["--logical-batch", str(logical_batch), "--json", str(path)]
        done, wall, _ = timed(command, {"MEMFIT_BENCH_BEGAN": repr(time.time())})
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} ended with {done.returncode}\n{done.stderr}")
        steps: dict[str, Any] = json.loads(path.read_text())
    return {**steps, "end Python": max(wall - sum(steps.values()), 0.0)}


def scan(trials: Scanner, logical_batch: int) -> Truth:
    """Try every size, and every divisor of the logical batch."""
    every = candidates(
        logical_batch=None, replicas=1, policy=Policy.EXACT, max_microbatch=logical_batch
    )
    exact = candidates(
        logical_batch=logical_batch, replicas=1, policy=Policy.EXACT, max_microbatch=None
    )
    return Truth(
        integers=tuple(trials.scan(map(every.split, every.sizes), beyond=3)),
        # All of them: the last one is a whole group at once, without gradients held.
        divisors=tuple(trials.scan(map(exact.split, exact.sizes), beyond=len(exact.sizes))),
    )


def judge(finder: Finder, trials: Scanner, truth: Truth, logical_batch: int) -> None:
    """Run a finder's answer in full groups, and hold it against the truth."""
    answer = finder.run.answer
    if not answer:
        return
    steps = -(-logical_batch // answer)
    finder.keeps = answer * steps == logical_batch
    split = Split(
        microbatch=answer,
        accumulation_steps=steps,
        logical_batch=logical_batch if finder.keeps else None,
    )
    finder.survives = trials.row(split).fits
    finder.largest = answer == truth.largest
    finder.largest_exact = answer == truth.largest_exact


# -- telling -------------------------------------------------------------------------------------


def _yes(value: bool | None) -> str:
    return "-" if value is None else "yes" if value else "no"


def _spread(finder: Finder) -> str:
    seconds = [run.wall_s for run in finder.runs]
    return f"{finder.median('wall_s'):.1f} ({min(seconds):.1f} to {max(seconds):.1f})"


HEADERS = (
    "finder",
    "whole process, s",
    "CPU, s",
    "trials",
    "examples run",
    "answer",
    "survives",
    "largest that fits",
    "keeps {batch}",
    "largest that keeps {batch}",
)


def table(benchmark: Benchmark) -> list[list[str]]:
    """Return the main table, its header first."""
    rows = [[header.format(batch=benchmark.logical_batch) for header in HEADERS]]
    for finder in benchmark.finders:
        run = finder.run
        name = finder.name
        if name == MEMFIT_EXACT:
            name = f"memfit, logical batch {benchmark.logical_batch}"
        rows.append(
            [
                name,
                _spread(finder),
                f"{finder.median('cpu_s'):.1f}",
                str(len(run.sizes)),
                f"{run.examples:,}",
                str(run.answer) if run.answer is not None else f"failed: {run.failure}",
                _yes(finder.survives),
                "not asked" if finder.name == MEMFIT_EXACT else _yes(finder.largest),
                _yes(finder.keeps),
                _yes(finder.largest_exact),
            ]
        )
    return rows


def phase_table(benchmark: Benchmark) -> list[list[str]]:
    """Return where a probe's time goes: medians of the runs."""
    names = list(benchmark.phases[0])
    seconds = {n: statistics.median(float(run[n]) for run in benchmark.phases) for n in names}
    whole = statistics.median(sum(float(s) for s in run.values()) for run in benchmark.phases)
    rows = [["step", "seconds", "share"]]
    rows += [[name, f"{s:.2f}", f"{s / whole:.0%}"] for name, s in seconds.items()]
    return [*rows, ["whole process", f"{whole:.2f}", "100%"]]


def print_table(rows: Sequence[Sequence[str]]) -> None:
    """Print columns, numbers or not, to the left."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        )
    print()


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """Write a table in Markdown."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    lines.insert(1, "|" + "---|" * len(rows[0]))
    return "\n".join(lines)


def tried(benchmark: Benchmark) -> list[list[str]]:
    """Return the sizes that each finder tried, failed ones in brackets."""
    rows = [["finder", "sizes in order, those that ran out of memory in brackets"]]
    for finder in benchmark.finders:
        pairs = zip(finder.run.sizes, finder.run.fitted, strict=True)
        sizes = ", ".join(str(size) if fits else f"({size})" for size, fits in pairs)
        rows.append([finder.name, sizes])
    return rows


def versions() -> str:
    """Name the versions and the machine."""
    packages = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES)
    memory = format_bytes(psutil.virtual_memory().total)
    return (
        f"{packages}; Python {platform.python_version()}; {_processor()}, "
        f"{psutil.cpu_count()} logical cores, {memory} of memory; {platform.system()}"
    )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.machine()


def as_markdown(benchmark: Benchmark, *, command: str) -> str:
    """Write the page."""
    repeats = len(benchmark.finders[0].runs)
    batch, truth = benchmark.logical_batch, benchmark.truth
    missed = holes(truth.integers)
    largest_row = next(r for r in truth.integers if r.microbatch == truth.largest)
    imported = "; ".join(f"{name} {s:.1f} s" for name, s in benchmark.imports.items())
    steady = all(finder.steady for finder in benchmark.finders)
    return f"""\
# Speed: memfit beside other batch size finders

The workload is GPT-2 (`{SETTING.target}`, 124M parameters, 1,024 tokens, {SETTING.precision.value}
autocast, AdamW) on a **virtual** {SETTING.card} with a limit of
{format_bytes(benchmark.limit_bytes)}: the card, less memfit's default headroom of
{SETTING.headroom}. Every finder ran on that same virtual card. Two questions are asked of every
answer: is it the largest microbatch that trains, and is it the largest that keeps a logical batch
of {batch}?

{_short(benchmark)}

{markdown_table(table(benchmark))}

*Whole process* is wall time from the start of the process to its end, imports and (for memfit) the
report included: the median of {repeats} runs, and their range. *CPU* is the processor time of the
process and its children. *Trials* counts every size tried, failed ones included; memfit's last
trial runs all microbatches of the group. *Examples run* went into a forward pass: on a real GPU,
where kernels take their time, this is what a search costs beside its fixed overhead. *Survives*
means that full groups of that microbatch ran in a fresh process.

## The truth

{len(truth.integers)} sizes were tried one by one, each in full groups in a fresh process, up to
three in a row whose need alone is above the limit: the largest that fits is
**{truth.largest}** ({format_bytes(largest_row.peak_bytes or 0)} of the device, virtual). Of all
{len(truth.divisors)} divisors of {batch}, the largest that fits is **{truth.largest_exact}**, with
{batch // (truth.largest_exact or 1)} accumulation steps. Sizes that fail below one that fits:
{", ".join(map(str, missed)) or "none here"}. Questions that do have such holes are in
[every size tried](speed/exhaustive.md).

{markdown_table(tried(benchmark))}

{_every_run(benchmark, steady=steady)}

{_fresh(benchmark)}

## Where a probe's time goes

`memfit {" ".join(probe_words(batch))}`, the median of {repeats} runs of
`python -m tests.benchmarks.phases`:

{markdown_table(phase_table(benchmark))}

Building the virtual GPU's driver took {benchmark.build_s:.1f} s. That happens once per installation
and is in none of the times above: the cache was warm. Until their libraries were imported, the
others took: {imported}.

## What is virtual, and what each finder was given

- No kernel is executed. PyTorch's CUDA build, autograd, optimizer and caching allocator run as on a
  card; values in tensors mean nothing. So times here are host time: process starts, imports, trials
  without their arithmetic. They compare finders with each other; they are not times on a real GPU.
- Lightning: `Tuner.scale_batch_size` with its defaults (`init_val=2`, `steps_per_trial=3`,
  `max_trials=25`, `max_val=8192`, `margin=0.05` in binsearch) around the same model, loss and
  optimizer, `precision="bf16-mixed"`, `accumulate_grad_batches=2`, without logger, checkpoints,
  progress bar and model summary. Its margin of 5 % of the *size* is headroom of its own on top of
  the limit, so binsearch is also shown with `margin=0`.
- accelerate: `find_executable_batch_size` with its defaults (from 128 down, times 0.9) around a
  loop of two groups of two microbatches, `mixed_precision="bf16"`,
  `gradient_accumulation_steps=2`. Its own wrapper returns the logits in float32.
- Both build the model on the device, as a memfit trial does. Built on the host, as many programs
  do, each build fills 124 million parameters there first.
- Their answer is a microbatch; neither looks for accumulation steps that keep a logical batch. The
  two last columns ask whether the answer could, with equal microbatches.
- The card is deterministic; the runs took turns on a machine that was not otherwise idle (load
  average {benchmark.load[0]:.1f} before, {benchmark.load[1]:.1f} after). One turn before them
  was not counted.

{benchmark.versions}.

Regenerate with

```
pip install -e '.[bench]'
{command}
```
"""


def _every_run(benchmark: Benchmark, *, steady: bool) -> str:
    if steady:
        return "All runs of a finder tried the same sizes and gave the same answer."
    names = ", ".join(finder.name for finder in benchmark.finders if not finder.steady)
    return f"Runs differed in what they tried or answered: {names}; the first run is shown."


def _short(benchmark: Benchmark) -> str:
    """Say what the table shows, good and bad."""
    largest, exact = benchmark.truth.largest, benchmark.truth.largest_exact
    finders = {finder.name: finder for finder in benchmark.finders}
    right = [f.name for f in benchmark.finders if f.largest and f.survives]
    right_exact = [f.name for f in benchmark.finders if f.largest_exact and f.survives]
    peers = [finders[name] for name in PEERS]
    quickest = min(peers, key=lambda f: f.median("wall_s"))
    fewest = min(peers, key=lambda f: len(f.run.sizes))
    ours = [finders[MEMFIT_OPEN], finders[MEMFIT_EXACT]]
    seconds = " and ".join(f"{f.median('wall_s'):.1f} s" for f in ours)
    trials = " and ".join(str(len(f.run.sizes)) for f in ours)
    ask = finders[MEMFIT_EXACT].run
    confirmed = (ask.answer or 0) * -(-benchmark.logical_batch // (ask.answer or 1)) * 2
    return f"""\
- The largest microbatch that trains is {largest}. Found by: {", ".join(right) or "none"}.
- The largest that keeps {benchmark.logical_batch} is {exact}. Found by: \
{", ".join(right_exact) or "none"}.
- memfit took {seconds} (without and with the logical batch); the quickest of the others, \
{quickest.name}, {quickest.median("wall_s"):.1f} s.
- memfit took {trials} trials; the fewest of the others are {len(fewest.run.sizes)} \
({fewest.name}, answer {fewest.run.answer}).
- With a logical batch, memfit's last trial runs two whole groups: {confirmed:,} of the \
{ask.examples:,} examples that it runs. Where kernels take their time, that is most of its cost."""


def _fresh(benchmark: Benchmark) -> str:
    """Say whether the largest size fits in the others' loops too, and who refused it."""
    largest = benchmark.truth.largest or 0
    lines = []
    for name, fits in benchmark.fresh.items():
        library = name.partition(",")[0]
        verb = "runs" if fits else "does not run"
        lines.append(f"{library}'s own loop {verb} {largest} when a new process starts with it.")
    refused = [
        f.name
        for f in benchmark.finders
        if (largest, False) in zip(f.run.sizes, f.run.fitted, strict=True)
    ]
    if refused and all(benchmark.fresh.values()):
        lines.append(
            f"Yet {largest} failed in {' and '.join(refused)}: there, all trials share one "
            "process, so the difference is what earlier ones left in it."
        )
    return " ".join(lines)


def as_json(benchmark: Benchmark) -> dict[str, Any]:
    """Return what `--json` writes."""
    return {
        **dataclasses.asdict(benchmark),
        "largest": benchmark.truth.largest,
        "largest_exact": benchmark.truth.largest_exact,
    }


def main() -> int:
    """Measure and tell."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.peers", description="Compare batch size finders."
    )
    parser.add_argument("--logical-batch", type=int, default=480)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    parser.add_argument(
        "--from-json", type=Path, metavar="FILE", help="tell what an earlier run saved; run nothing"
    )
    asked = parser.parse_args()
    assert SETTING.precision is Precision.BF16  # what the others are given
    assert UNSPLIT_ACCUMULATION_STEPS == 2  # what the others are given
    if asked.from_json is None:
        benchmark = measure(asked.logical_batch, asked.repeats)
    else:
        benchmark = msgspec.json.decode(asked.from_json.read_bytes(), type=Benchmark)
    print_table(table(benchmark))
    print_table(tried(benchmark))
    print_table(phase_table(benchmark))
    print(
        f"largest that fits: {benchmark.truth.largest}; with the logical batch: "
        f"{benchmark.truth.largest_exact}"
    )
    print(f"driver build: {benchmark.build_s:.1f} s, once; kernels are not executed (virtual)")
    if asked.json is not None:
        asked.json.parent.mkdir(parents=True, exist_ok=True)
        asked.json.write_text(json.dumps(as_json(benchmark), indent=2) + "\n")
    if asked.markdown is not None:
        command = f"python -m tests.benchmarks.peers --markdown {asked.markdown}"
        saved = asked.json or asked.from_json
        if saved is not None:
            command += f" --json {saved}"
        asked.markdown.write_text(as_markdown(benchmark, command=command))
    return 0


if __name__ == "__main__":
    sys.exit(main())
