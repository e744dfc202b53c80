"""`memfit gate` on the three examples in two clean checkouts: seconds, and whether bytes are equal.

    python -m tests.benchmarks.gate --alone --out reports/gate.md

Each checkout is a clone of this repository's HEAD. A baseline is written in both, and both check
against the first one's; everything starts cold, without a process that is kept warm.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
UPDATES = (
    ("examples/gpt2.py", "--device", "rtx-4090", "--precision", "bf16", "-m", "8", "-A", "2"),
    ("examples/resnet50.py", "--device", "a100-40gb", "--precision", "fp16", "-m", "32", "-A", "2"),
    ("examples/mlp.py", "--device", "rtx-3060", "-m", "256", "-A", "2"),
)
AIM_S = 15.0
ALONE = ("chrt", "-r", "1")
"""Runs a command before all others that are not real-time, so that its seconds are its own."""


def gate(checkout: Path, *words: str, alone: bool = False) -> tuple[bytes, float, float]:
    """Run a gate in a checkout, and return its stdout, seconds, and seconds of CPU."""
    variables = {**os.environ, "PYTHONPATH": str(checkout)}
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    done = subprocess.run(
        [*(ALONE if alone else ()), sys.executable, "-m", "memfit", "gate", "--quiet", *words],
        cwd=checkout,
        env=variables,
        capture_output=True,
        check=False,
    )
    wall, after = time.monotonic() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        sys.exit(f"memfit gate {' '.join(words)} ended with {done.returncode}:\n{done.stderr!r}")
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return done.stdout, wall, cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument(
        "--alone", action="store_true", help="let nothing else run beside the checks (root)"
    )
    given = parser.parse_args()
    out = given.out
    rows, baselines, results = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        for name in ("one", "two"):
            checkout = Path(folder) / name
            subprocess.run(["git", "clone", "-q", str(ROOT), str(checkout)], check=True)
            for words in UPDATES:
                gate(checkout, "--update", *words)
            baseline = checkout / "memfit-baseline.json"
            baselines.append(baseline.read_bytes())
            if name == "two":
                shutil.copy(Path(folder) / "one" / "memfit-baseline.json", baseline)
            told, wall, cpu = gate(checkout, "--json", alone=given.alone)
            results.append(told)
            rows.append(f"| {name} | {wall:.1f} | {cpu:.1f} | {len(told):,} |")
            print(rows[-1], flush=True)
    same = {"baselines": len(set(baselines)) == 1, "results": len(set(results)) == 1}
    text = "\n".join(
        [
            "# memfit gate on the three examples, virtual",
            "",
            "Made by `python -m tests.benchmarks.gate --alone --out reports/gate.md`: "
            "GPT-2 (8 \u00d7 2, "
            "bf16, RTX 4090), ResNet-50 (32 \u00d7 2, fp16, A100 40 GB) and the MLP (256 \u00d7 2, "
            "fp32, RTX 3060), all cards virtual, in two clones of one commit, cold.",
            "",
            "| checkout | seconds | seconds of CPU | bytes of JSON |",
            "|---|---:|---:|---:|",
            *rows,
            "",
            f"The two baselines are {'equal' if same['baselines'] else 'NOT equal'} to the byte "
            f"({len(baselines[0]):,} bytes each), and so "
            f"{'are' if same['results'] else 'are NOT'} the two results.",
            "",
            f"Aim: under {AIM_S:.0f} s on two cores. This machine has {os.cpu_count()}; its load "
            f"average at the end was {os.getloadavg()[0]:.1f}. "
            + (
                "The checks ran before all other programs (`chrt -r 1`), as on an idle machine."
                if given.alone
                else "Where other programs run beside it, the seconds are more than the gate's own."
            ),
            "",
        ]
    )
    print(text)
    if out is not None:
        out.write_text(text)
    sys.exit(not all(same.values()))


if __name__ == "__main__":
    main()
