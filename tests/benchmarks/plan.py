"""A capacity plan beside separate probes: how long it takes, and whether every cell is the same.

    python -m tests.benchmarks.plan
    python -m tests.benchmarks.plan --kill 20   # kill it after so many seconds, and go on

Plans GPT-2 on 3 cards with 3 lengths and 2 precisions, then asks the probe of each cell alone, as
the plan says it is asked, and compares everything that is no time of day and no process number.
The exit status is 1 when a cell differs.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
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
_INCIDENTAL = {"wall_s", "seconds", "created", "command", "output_tail", "traceback"}


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
    spent = 0.0
    if kill_after_s is not None:
        started = time.monotonic()
        running = subprocess.Popen(
            words, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        time.sleep(kill_after_s)
        os.kill(running.pid, signal.SIGKILL)
        running.wait()
        spent = time.monotonic() - started
        kept = sorted(path.parent.name for path in out.glob("cells/*/memfit.json"))
        print(f"killed after {spent:.1f} s with {len(kept)} finished cells")
    started = time.monotonic()
    done = subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True)
    return spent + time.monotonic() - started, done.stderr.splitlines()


def main() -> int:
    """Run the plan and the probes, and say what differs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kill", type=float, metavar="SECONDS")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "plan"
        took, said = _plan(out, kill_after_s=asked.kill)
        print(*(line for line in said if line.startswith("going on")), sep="\n")
        cells = json.loads((out / "capacity.json").read_text())["cells"]
        load = os.getloadavg()[0]
        print(f"{len(cells)} cells in {took:.1f} s on {os.cpu_count()} cores (load {load:.1f})")
        differ, alone_s = 0, 0.0
        for cell in cells:
            alone = Path(folder) / "alone" / f"cell-{cell['index']}"
            words = [*shlex.split(cell["command"])[1:], "--out", str(alone), "--quiet"]
            started = time.monotonic()
            subprocess.run(_command(*words), cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
            alone_s += time.monotonic() - started
            one = json.loads((alone / "memfit.json").read_text())
            other = json.loads((out / cell["folder"] / "memfit.json").read_text())
            same = _kept(one) == _kept(other)
            differ += not same
            print(
                f"{'same' if same else 'DIFFERS':8}{cell['folder']}: microbatch "
                f"{cell['split']['microbatch']}, peak {cell['peak_bytes']:,} bytes (virtual)"
            )
        print(f"{len(cells) - differ} of {len(cells)} cells are what the probe alone answers")
        print(f"the probes alone took {alone_s:.1f} s one after the other")
    return int(differ > 0)


if __name__ == "__main__":
    sys.exit(main())
