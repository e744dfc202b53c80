"""A capacity plan beside separate probes: how long it takes, and whether every cell is the same.

    python -m tests.benchmarks.plan
    python -m tests.benchmarks.plan --kill 20   # kill it after so many seconds, and go on
    python -m tests.benchmarks.plan --page reports/plan.md

Plans GPT-2 on 3 cards with 3 lengths and 2 precisions, then asks the probe of each cell alone, as
the plan says it is asked, and compares everything that is no time of day and no process number.
The exit status is 1 when a cell differs.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
QUESTION = (
    "examples/gpt2.py",
    *("--on", "a100-40gb,h100-80gb,rtx-4090"),
    *("--set", "seq_len=1024,2048,4096"),
    *("--precision", "bf16,fp32"),
    *("--logical-batch", "512"),
)
_INCIDENTAL = {
    "wall_s",
    "seconds",
    "created",
    "command",
    "output_tail",
    "traceback",
    "ledger",
    "composition",
}


def _command(*words: str) -> list[str]:
    return [sys.executable, "-m", "memfit", *words]


def _kept(value: Any) -> Any:
    """Drop times, process numbers and frames of torch from a record."""
    if isinstance(value, dict):
        return {k: _kept(v) for k, v in value.items() if k not in _INCIDENTAL}
    return [_kept(v) for v in value] if isinstance(value, list) else value


def _plan(out: Path, *, kill_after_s: float | None) -> tuple[float, list[str]]:
    """Run the plan; killed in the middle where it is asked, and then run again."""
    words = _command("plan", *QUESTION, "--out", str(out))
    spent, said = 0.0, []
    if kill_after_s is not None:
        started = time.monotonic()
        running = subprocess.Popen(
            words, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        time.sleep(kill_after_s)
        os.kill(running.pid, signal.SIGKILL)
        running.wait()
        spent = time.monotonic() - started
        kept = len(list(out.glob("cells/*/memfit.json")))
        begun = len(list(out.glob("cells/*/memfit.progress.json")))
        said.append(
            f"killed with SIGKILL after {spent:.1f} s, with {kept} cells finished and {begun} begun"
        )
    started = time.monotonic()
    done = subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True)
    said += [line for line in done.stderr.splitlines() if line.startswith("going on")]
    return spent + time.monotonic() - started, said


def _compare(cell: dict[str, Any], out: Path, alone: Path) -> bool:
    """Ask the probe of one cell alone; whether it answers the same."""
    words = [*shlex.split(cell["command"])[1:], "--out", str(alone), "--quiet"]
    subprocess.run(_command(*words), cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    one = json.loads((alone / "memfit.json").read_text())
    other = json.loads((out / cell["folder"] / "memfit.json").read_text())
    return bool(_kept(one) == _kept(other))


def main() -> int:
    """Run the plan and the probes, say what differs, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kill", type=float, metavar="SECONDS")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write a page in Markdown")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "plan"
        loads = [os.getloadavg()[0]]
        took, said = _plan(out, kill_after_s=asked.kill)
        loads.append(os.getloadavg()[0])
        cells = json.loads((out / "capacity.json").read_text())["cells"]
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        facts = [
            *said,
            f"{len(cells)} cells in {took:.1f} s of wall time on {os.cpu_count()} cores, "
            f"{used.ru_utime + used.ru_stime:.1f} s of processor time; the load of the machine "
            f"was {loads[0]:.1f} before it and {loads[1]:.1f} after it",
        ]
        print(*facts, sep="\n", flush=True)
        rows, started = [], time.monotonic()
        for cell in cells:
            same = _compare(cell, out, Path(folder) / f"cell-{cell['index']}")
            size, peak = cell["split"]["microbatch"], cell["peak_bytes"]
            rows.append((same, cell["folder"].removeprefix("cells/"), size, peak))
            print("same   " if same else "DIFFERS", *rows[-1][1:], flush=True)
        facts += [
            f"{sum(row[0] for row in rows)} of {len(rows)} cells are what the probe alone answers",
            f"those probes took {time.monotonic() - started:.1f} s one after the other",
        ]
        print(*facts[-2:], sep="\n")
    if asked.page:
        asked.page.write_text(_page(facts, rows, kill_after_s=asked.kill))
    return int(not all(row[0] for row in rows))


def _page(
    facts: Sequence[str], rows: Sequence[tuple[bool, str, int, int]], *, kill_after_s: float | None
) -> str:
    command = "python -m tests.benchmarks.plan --page reports/plan.md"
    if kill_after_s is not None:
        command += f" --kill {kill_after_s:g}"
    lines = [
        "# A capacity plan beside the probes of its cells",
        "",
        f"Made by `{command}`. All figures are virtual. Everything in `memfit.json` was compared "
        "but times, process numbers, the frames of torch in tracebacks, and the parts of the peak, "
        "which a probe alone tells by block from one run more.",
        "",
        f"    memfit plan {shlex.join(QUESTION)}",
        "",
        *(f"- {fact}" for fact in facts),
        "",
        "| cell | microbatch | peak, bytes | the probe alone |",
        "|---|---:|---:|---|",
        *(
            f"| {name} | {size} | {peak:,} | {'the same' if same else 'differs'} |"
            for same, name, size, peak in rows
        ),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
