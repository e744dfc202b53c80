"""Where a probe's own time goes: the steps of `memfit probe`, each with its seconds.

    python -m tests.benchmarks.phases examples/gpt2.py --logical-batch 480

Runs the command itself in this process, with a clock around its parts.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

BEGAN = time.time()

from memfit.__main__ import hurry  # noqa: E402 - the import is part of what is timed

if __name__ == "__main__":
    hurry(["probe", *sys.argv[1:]])

from memfit import cli, probe  # noqa: E402 - as above
from memfit.records import TrialResult  # noqa: E402
from memfit.trial.runner import TrialRunner  # noqa: E402

START = "start Python and the import of torch, import memfit"
DRIVER = "find the virtual GPU's driver"
IMPORT = "the rest of the import of torch, import the workload"
TRIALS = "trials"
CLOSE = "end the workers' process"
PROBE = "probe"
PRINT = "print the answer"
PAGES = "write trials.csv and report.html"


class Clock:
    """Seconds by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.results: list[TrialResult] = []

    def timed(self, name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function so that its seconds are counted under a name."""

        def wrapped(*args: Any, **keywords: Any) -> Any:
            began = time.monotonic()
            try:
                value = run(*args, **keywords)
            finally:
                self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - began
            if isinstance(value, TrialResult):
                self.results.append(value)
            return value

        return wrapped

    def watch(self, owner: Any, method: str, name: str) -> None:
        """Count the seconds of a function where it lives."""
        setattr(owner, method, self.timed(name, getattr(owner, method)))


def measure(words: Sequence[str], *, process_began: float) -> dict[str, float]:
    """Run a command line of memfit and return the seconds of its steps."""
    clock = Clock()
    face = importlib.import_module("memfit.cli.probe")
    clock.watch(probe, "worker_environment", DRIVER)
    clock.watch(TrialRunner, "open", IMPORT)
    clock.watch(TrialRunner, "run", TRIALS)
    clock.watch(TrialRunner, "close", CLOSE)
    clock.watch(probe, "run_probe", PROBE)
    clock.watch(face, "_print", PRINT)
    clock.watch(face, "_write_pages", PAGES)
    started = time.time() - process_began
    began = time.monotonic()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        code = cli.main(list(words))
    whole = time.monotonic() - began
    if code:
        raise SystemExit(f"memfit {' '.join(words)} ended with {code}")
    seconds = clock.seconds
    confirmed = [t.wall_s for t in clock.results if t.spec.purpose == "confirm"]
    searched = [t.wall_s for t in clock.results if t.spec.purpose != "confirm"]
    between = max(seconds[TRIALS] - sum(searched) - sum(confirmed), 0.0)
    inside = sum(seconds[name] for name in (DRIVER, IMPORT, TRIALS, CLOSE))
    outside = sum(seconds[name] for name in (PROBE, PRINT, PAGES))
    return {
        START: started,
        "parse the command line": max(whole - outside, 0.0),
        DRIVER: seconds[DRIVER],
        IMPORT: seconds[IMPORT],
        f"{len(searched)} search trials": sum(searched),
        f"{len(confirmed)} confirming trial{'s' * (len(confirmed) != 1)}, full groups": sum(
            confirmed
        ),
        "search, classify, save after each trial": max(seconds[PROBE] - inside, 0.0) + between,
        CLOSE: seconds[CLOSE],
        PRINT: seconds[PRINT],
        PAGES: seconds[PAGES],
    }


def main() -> None:
    """Measure once and print the steps."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.phases")
    parser.add_argument("target", nargs="?", default="examples/gpt2.py")
    parser.add_argument("--device", default="rtx-4090")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--logical-batch")
    parser.add_argument("--json", type=Path, metavar="FILE")
    asked = parser.parse_args()
    words = ["probe", asked.target, "--device", asked.device, "--precision", asked.precision]
    words += ["--allocator", "default"]
    if asked.logical_batch is not None:
        words += ["--logical-batch", asked.logical_batch]
    began = float(os.environ.get("MEMFIT_BENCH_BEGAN", BEGAN))
    with tempfile.TemporaryDirectory(prefix="memfit-bench-") as folder:
        steps = measure([*words, "--out", f"{folder}/probe"], process_began=began)
    for name, seconds in steps.items():
        print(f"{seconds:8.3f} s  {name}")
    print(f"{sum(steps.values()):8.3f} s  in all")
    if asked.json is not None:
        asked.json.write_text(json.dumps(steps, indent=2) + "\n")


if __name__ == "__main__":
    main()
