"""Run every candidate size one by one, and ask a probe the same question.

    python -m tests.benchmarks.exhaustive
    python -m tests.benchmarks.exhaustive --cards rtx-3090,rtx-4090,a10 --precisions bf16,fp32 \
        --headrooms 0%,1%,2%,5% --set seq_len=1024,2048
    python -m tests.benchmarks.exhaustive --memory-limits card,10.2GiB,19.6GiB,20GiB \
        --headrooms 0%

A probe runs a few trials and says which size is the largest that fits. Here every size is tried, up
to several in a row that need more than the limit whatever the allocator's layout, so the largest is
known. Sizes that fail below one that fits are marked as holes; the last command has one.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import shlex
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memfit.batch import candidates
from memfit.errors import NothingFits
from memfit.probe import ProbeRequest, run_probe
from memfit.records import Policy, Precision
from memfit.units import GIB
from tests.benchmarks.scan import Deaf, Row, Setting, holes, scanner

GIVE_UP_ABOVE = 4096
"""A scan that has found no ceiling by this size is not worth its time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One question, answered by trying everything and by a probe."""

    setting: Setting
    logical_batch: int | None
    limit_bytes: int
    rows: tuple[Row, ...]
    probe_answer: int | None
    probe_trials: int
    """Trials that the probe spent; 0 where it found that nothing fits."""
    probe_sizes: tuple[int, ...]
    """Sizes that the probe tried, in its order."""
    probe_notes: tuple[str, ...]

    @property
    def truth(self) -> int | None:
        """The largest size that fits."""
        return max((row.microbatch for row in self.rows if row.fits), default=None)

    @property
    def holes(self) -> list[int]:
        """Sizes that fail below one that fits."""
        return holes(self.rows)

    @property
    def agrees(self) -> bool:
        """Whether the probe found the largest size that fits."""
        return self.truth == self.probe_answer


def compare(
    setting: Setting,
    *,
    logical_batch: int | None,
    policy: Policy,
    beyond: int,
) -> Comparison:
    """Try every candidate, then ask a probe."""
    sizes = candidates(
        logical_batch=logical_batch,
        replicas=1,
        policy=policy,
        max_microbatch=GIVE_UP_ABOVE if logical_batch is None else None,
    )
    with scanner(setting) as trials:
        limit = trials.device.limit_bytes
        rows = tuple(trials.scan(map(sizes.split, sizes.sizes), beyond=beyond))
    with tempfile.TemporaryDirectory(prefix="memfit-bench-") as folder:
        request = ProbeRequest(
            target=setting.target,
            parameters=setting.parameters,
            device=setting.card,
            memory_limit=setting.memory_limit,
            headroom=setting.headroom,
            logical_batch=logical_batch,
            policy=policy,
            precision=setting.precision,
            out=Path(folder) / "probe",
        )
        try:
            result, _ = run_probe(request, Deaf())
        except NothingFits:
            result = None
    if result is not None and result.spec.device.limit_bytes != limit:
        raise SystemExit("the scan and the probe had different limits; this is a bug")
    return Comparison(
        setting=setting,
        logical_batch=logical_batch,
        limit_bytes=limit,
        rows=rows,
        probe_answer=result.split.microbatch if result else None,
        probe_trials=len(result.trials) if result else 0,
        probe_sizes=tuple(t.spec.split.microbatch for t in result.trials) if result else (),
        probe_notes=result.notes if result else (),
    )


def _gib(value: int | None) -> str:
    return "-" if value is None else f"{value / GIB:.3f}"


def show(comparison: Comparison, *, full: bool) -> None:
    """Print one comparison: every size, or what is near the limit."""
    limit = comparison.limit_bytes
    split = (
        "" if comparison.logical_batch is None else f", logical batch {comparison.logical_batch}"
    )
    print(f"{comparison.setting.title}{split}: limit {_gib(limit)} GiB (virtual)")
    print(f"  {'m':>5} {'A':>4}  {'verdict':<10} {'allocated':>9} {'device':>8} {'need':>8}  GiB")
    shown = comparison.rows if full else comparison.rows[-14:]
    if len(shown) < len(comparison.rows):
        print(f"  ... {len(comparison.rows) - len(shown)} smaller sizes, --full shows them")
    missed = set(comparison.holes)
    for row in shown:
        marks = []
        if row.microbatch in missed:
            marks.append("HOLE: a larger size fits")
        if row.microbatch == comparison.truth:
            marks.append("largest that fits")
        if row.microbatch == comparison.probe_answer:
            marks.append("the probe's answer")
        if row.need_bytes is not None and row.need_bytes > limit:
            marks.append("need alone is above the limit")
        if row.microbatch in comparison.probe_sizes:
            marks.append("tried by the probe")
        print(
            f"  {row.microbatch:>5} {row.accumulation_steps:>4}  {row.verdict:<10} "
            f"{_gib(row.peak_allocated_bytes):>9} {_gib(row.peak_bytes):>8} "
            f"{_gib(row.need_bytes):>8}  {'; '.join(marks)}".rstrip()
        )
    verdict = "agree" if comparison.agrees else "DISAGREE"
    print(
        f"  {verdict}: exhaustive {comparison.truth} in {len(comparison.rows)} sizes, probe "
        f"{comparison.probe_answer} in {comparison.probe_trials} trials; "
        f"holes: {', '.join(map(str, comparison.holes)) or 'none'}\n"
    )


def summary(comparisons: list[Comparison]) -> None:
    """Print one line for each question."""
    width = max(len(c.setting.title) for c in comparisons)
    print(f"{'question':<{width}}  {'exhaustive':>10} {'probe':>6} {'trials':>6}  holes")
    for c in comparisons:
        mark = "" if c.agrees else "  DISAGREE"
        print(
            f"{c.setting.title:<{width}}  {c.truth or '-':>10} {c.probe_answer or '-':>6} "
            f"{c.probe_trials:>6}  {', '.join(map(str, c.holes)) or '-'}{mark}"
        )
    agreed = sum(c.agrees for c in comparisons)
    with_holes = sum(bool(c.holes) for c in comparisons)
    print(f"{agreed} of {len(comparisons)} agree; {with_holes} have holes")


def as_markdown(comparisons: list[Comparison], *, command: str) -> str:
    """Write all questions, and around each hole every size."""
    agreed = sum(c.agrees for c in comparisons)
    with_holes = [c for c in comparisons if c.holes]
    tried = sum(len(c.rows) for c in comparisons)
    spent = sum(c.probe_trials for c in comparisons)
    lines = [
        "# Every size tried, and a probe's answer",
        "",
        "Every size was run in full groups in a fresh process, one by one, until several in a row",
        "needed more than the limit whatever the allocator's layout; then a probe was asked the",
        "same question. The cards are **virtual**: kernels are not executed.",
        "",
        f"**{agreed} of {len(comparisons)}** answers agree: {tried} sizes tried one by one,",
        f"{spent} trials spent by the probes. In {len(with_holes)} questions a size fails below",
        "one that fits (a *hole*: the memory is there, but in pieces).",
        "",
        "| question | largest that fits | probe | its trials | sizes tried here | holes |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {c.setting.title}{_batch(c)} | {c.truth or 'none'} | {c.probe_answer or 'none'}"
        f"{'' if c.agrees else ' **wrong**'} | {c.probe_trials} | {len(c.rows)} "
        f"| {', '.join(map(str, c.holes)) or '-'} |"
        for c in comparisons
    ]
    shown: set[tuple[object, ...]] = set()
    for c in with_holes:
        rows = [r for r in c.rows if min(c.holes) - 2 <= r.microbatch <= (c.truth or 0) + 2]
        key = tuple((r.microbatch, r.verdict, r.need_bytes) for r in rows)
        if key in shown:
            continue
        shown.add(key)
        lines += [
            "",
            f"## A hole: {c.setting.title}{_batch(c)}",
            "",
            f"The limit is {_gib(c.limit_bytes)} GiB. *Need* is allocated memory and the context,",
            "whatever the layout; *device* is what was in use at the peak. All in GiB, virtual.",
            "",
            "| microbatch | verdict | need | device |",
            "|---|---|---|---|",
        ]
        lines += [
            f"| {r.microbatch} | {r.verdict}{' (hole)' if r.microbatch in c.holes else ''} "
            f"| {_gib(r.need_bytes)} | {_gib(r.peak_bytes)} |"
            for r in rows
        ]
    return "\n".join([*lines, "", "Regenerate with", "", "```", command, "```", ""])


def _batch(comparison: Comparison) -> str:
    batch = comparison.logical_batch
    return "" if batch is None else f", logical batch {batch}"


def as_json(comparisons: list[Comparison]) -> list[dict[str, Any]]:
    """Return what `--json` writes."""
    return [
        {
            **dataclasses.asdict(c),
            "truth": c.truth,
            "holes": c.holes,
            "agrees": c.agrees,
        }
        for c in comparisons
    ]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.exhaustive",
        description="Try every size and compare with a probe, on virtual cards.",
    )
    parser.add_argument("target", nargs="?", default=Setting().target)
    parser.add_argument("--cards", default="rtx-4090", help="comma-separated (rtx-4090)")
    parser.add_argument("--precisions", default="bf16", help="comma-separated (bf16)")
    parser.add_argument("--headrooms", default="2%", help="comma-separated (2%%)")
    parser.add_argument(
        "--memory-limits", default="card", help="comma-separated; `card` is no limit (card)"
    )
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE[,VALUE]")
    parser.add_argument("--logical-batch", type=int, help="only sizes that keep it")
    parser.add_argument("--policy", default="exact", choices=[p.value for p in Policy])
    parser.add_argument("--beyond", type=int, default=3, help="sizes above the ceiling (3)")
    parser.add_argument("--full", action="store_true", help="print every size")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    return parser.parse_args()


def main() -> int:
    """Run the comparisons that the command line asks for."""
    asked = _arguments()
    names = [setting.partition("=")[0] for setting in asked.set]
    values = [setting.partition("=")[2].split(",") for setting in asked.set]
    comparisons: list[Comparison] = []
    command = shlex.join(["python", "-m", "tests.benchmarks.exhaustive", *sys.argv[1:]])
    for card, precision, chosen, limit, headroom in itertools.product(
        asked.cards.split(","),
        asked.precisions.split(","),
        itertools.product(*values),
        asked.memory_limits.split(","),
        asked.headrooms.split(","),
    ):
        setting = Setting(
            target=asked.target,
            card=card,
            precision=Precision(precision),
            headroom=headroom,
            memory_limit=None if limit == "card" else limit,
            parameters=dict(zip(names, chosen, strict=True)),
        )
        comparison = compare(
            setting,
            logical_batch=asked.logical_batch,
            policy=Policy(asked.policy),
            beyond=asked.beyond,
        )
        show(comparison, full=asked.full)
        comparisons.append(comparison)
        if asked.json is not None:
            asked.json.parent.mkdir(parents=True, exist_ok=True)
            asked.json.write_text(json.dumps(as_json(comparisons), indent=2) + "\n")
        if asked.markdown is not None:
            asked.markdown.parent.mkdir(parents=True, exist_ok=True)
            asked.markdown.write_text(as_markdown(comparisons, command=command))
    if len(comparisons) > 1:
        summary(comparisons)
    return 0 if all(c.agrees for c in comparisons) else 1


if __name__ == "__main__":
    sys.exit(main())
