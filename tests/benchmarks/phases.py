"""Where a probe's own time goes: the steps of `memfit probe`, each with its seconds.

    python -m tests.benchmarks.phases examples/gpt2.py --logical-batch 480

Runs what `memfit probe` runs, in the same order, with a clock at each step.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

BEGAN = time.time()

from memfit import probe  # noqa: E402 - the import is part of what is timed
from memfit.records import Precision, TrialResult  # noqa: E402
from memfit.trial.runner import TrialRunner  # noqa: E402
from tests.benchmarks.scan import Deaf  # noqa: E402


class Clock:
    """Seconds by name, in the order in which names were first seen."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def timed(self, name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function so that its seconds are counted under a name."""

        def wrapped(*args: Any, **keywords: Any) -> Any:
            began = time.monotonic()
            try:
                return run(*args, **keywords)
            finally:
                self.add(name, time.monotonic() - began)

        return wrapped

    def add(self, name: str, seconds: float) -> None:
        """Count seconds under a name."""
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds


class Trials(Deaf):
    """Keeps what ran."""

    def __init__(self) -> None:
        self.results: list[TrialResult] = []

    def finished(self, trial: TrialResult) -> None:
        self.results.append(trial)


def measure(
    target: str, *, card: str, precision: str, logical_batch: int | None, process_began: float
) -> dict[str, Any]:
    """Run a probe and return the seconds of its steps."""
    clock = Clock()
    clock.add("start Python, import memfit", time.time() - process_began)
    probe.worker_environment = clock.timed(
        "find the built driver (digest of its sources)", probe.worker_environment
    )
    setattr(TrialRunner, "open", clock.timed("import torch and the workload", TrialRunner.open))
    setattr(TrialRunner, "run", clock.timed("trials", TrialRunner.run))
    setattr(TrialRunner, "close", clock.timed("end the nursery", TrialRunner.close))
    listener = Trials()
    with tempfile.TemporaryDirectory(prefix="memfit-bench-") as folder:
        began = time.monotonic()
        result, home = probe.run_probe(
            probe.ProbeRequest(
                target=target,
                device=card,
                precision=Precision(precision),
                logical_batch=logical_batch,
                out=Path(folder) / "probe",
            ),
            listener,
        )
        whole = time.monotonic() - began
        known = sum(clock.seconds.values()) - clock.seconds["start Python, import memfit"]
        clock.add("search, and saving after each trial", whole - known)
        began = time.monotonic()
        from rich.console import Console

        from memfit.cli.answer import render_answer

        render_answer(result, Console(file=io.StringIO(), width=80))
        clock.add("print the answer", time.monotonic() - began)
        began = time.monotonic()
        from memfit.export.csv import trials_csv

        home.write("trials.csv", trials_csv(result).encode())
        clock.add("trials.csv", time.monotonic() - began)
        began = time.monotonic()
        from memfit.report import render

        home.write("report.html", render(result).encode())
        clock.add("report.html", time.monotonic() - began)
    searched = [t for t in listener.results if not (t.spec.purpose == "confirm")]
    confirmed = [t for t in listener.results if t.spec.purpose == "confirm"]
    steps = dict(clock.seconds)
    trials = steps.pop("trials")
    searching = sum(t.wall_s for t in searched)
    confirming = sum(t.wall_s for t in confirmed)
    order = {
        "start Python, import memfit": steps.pop("start Python, import memfit"),
        "find the built driver (digest of its sources)": steps.pop(
            "find the built driver (digest of its sources)"
        ),
        "import torch and the workload": steps.pop("import torch and the workload"),
        f"{len(searched)} search trials": searching,
        f"{len(confirmed)} confirming trials, full groups": confirming,
        "between trials (start, classify, clean up)": max(trials - searching - confirming, 0.0),
        **steps,
    }
    return {"answer": result.split.microbatch, "steps": order, "total_s": time.time() - process_began}


def main() -> None:
    """Measure once and print the steps."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.phases")
    parser.add_argument("target", nargs="?", default="examples/gpt2.py")
    parser.add_argument("--card", default="rtx-4090")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--logical-batch", type=int)
    parser.add_argument("--json", type=Path, metavar="FILE")
    asked = parser.parse_args()
    measured = measure(
        asked.target,
        card=asked.card,
        precision=asked.precision,
        logical_batch=asked.logical_batch,
        process_began=float(os.environ.get("MEMFIT_BENCH_BEGAN", BEGAN)),
    )
    for name, seconds in measured["steps"].items():
        print(f"{seconds:8.3f} s  {name}")
    print(f"{measured['total_s']:8.3f} s  in all")
    if asked.json is not None:
        asked.json.write_text(json.dumps(measured, indent=2) + "\n")


if __name__ == "__main__":
    main()
