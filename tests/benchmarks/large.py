"""What a probe of a large model costs this machine: seconds, processor time and host memory.

    python -m tests.benchmarks.large --out reports/large.md

Llama in bfloat16 with AdamW, checkpointing and 2,048 tokens (`examples/llama.py`) on a virtual H100
80GB: 7B, which fits, and 70B, which does not. The whole command is measured, with every process
that it starts: interpreter, torch, trials and report.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from memfit.units import GIB

ROOT = Path(__file__).parents[2]
_LOOK_S = 0.02
SETTINGS = {
    "7B": (),
    "7B, logical batch 64": ("-B", "64"),
    "7B, logical batch 512": ("-B", "512"),
    "70B": tuple(
        f"--set={name}"
        for name in ("width=8192", "layers=80", "heads=64", "groups=8", "hidden=28672")
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What one command took."""

    name: str
    answer: str
    """First line of the answer, or the error."""
    trials: int
    wall_s: float
    processor_s: float
    """Processor time of all processes."""
    resident_bytes: int
    """The most that all processes had resident at one moment, shared pages counted for each."""
    load: float
    """Processes that wanted a core during the last minute, as the kernel counts them."""


def measure(name: str, words: tuple[str, ...]) -> Cost:
    """Run one probe as its user does."""
    with tempfile.TemporaryDirectory(prefix="memfit-large-") as folder:
        command = [
            *(sys.executable, "-m", "memfit", "probe", "examples/llama.py"),
            *("--device", "h100-80gb", "--out", f"{folder}/out", *words),
        ]
        output = Path(folder) / "output"
        with output.open("wb") as stream:
            started = time.monotonic()
            before = os.times()
            process = subprocess.Popen(command, cwd=ROOT, stdout=stream, stderr=subprocess.STDOUT)
            most = _watch(process)
            wall = time.monotonic() - started
            after = os.times()
        lines = output.read_text().splitlines()
    told = [line for line in lines if line.startswith(("Train with", "error:"))]
    return Cost(
        name=name,
        answer=told[0] if told else "no answer",
        trials=sum(line.startswith("trial ") for line in lines),
        wall_s=wall,
        processor_s=(
            after.children_user
            + after.children_system
            - before.children_user
            - before.children_system
        ),
        resident_bytes=most,
        load=os.getloadavg()[0],
    )


def _watch(process: subprocess.Popen[bytes]) -> int:
    """Return the most that a process and all under it had resident together."""
    most = 0
    root = psutil.Process(process.pid)
    while process.poll() is None:
        total = 0
        with contextlib.suppress(psutil.Error):
            for one in (root, *root.children(recursive=True)):
                with contextlib.suppress(psutil.Error):
                    total += one.memory_info().rss
        most = max(most, total)
        time.sleep(_LOOK_S)
    return most


def as_markdown(costs: list[Cost], command: str) -> str:
    """Write the page."""
    lines = [
        "# What a probe of a large model costs",
        "",
        "Llama in bfloat16, AdamW, activation checkpointing, 2,048 tokens, on a **virtual** H100",
        f"80GB; {os.cpu_count()} processor cores, no GPU. The whole command with all its",
        "processes, import of torch and report included. *Resident* counts pages that processes",
        "share once for each. Where the load is above the cores, other work ran beside it: the",
        "processor time is then the figure that repeats.",
        "",
        "| model | trials | seconds | processor seconds | resident, GiB | load | answer |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {c.name} | {c.trials} | {c.wall_s:.1f} | {c.processor_s:.1f} "
        f"| {c.resident_bytes / GIB:.2f} | {c.load:.1f} | {c.answer} |"
        for c in costs
    ]
    return "\n".join([*lines, "", "Regenerate with", "", "```", command, "```", ""])


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, help="write the page here as well")
    given = parser.parse_args()
    costs = [measure(name, words) for name, words in SETTINGS.items()]
    command = shlex.join(["python", "-m", "tests.benchmarks.large", *sys.argv[1:]])
    page = as_markdown(costs, command)
    print(page)
    if given.out:
        given.out.write_text(page)


if __name__ == "__main__":
    main()
