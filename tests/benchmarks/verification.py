"""What `memfit verify` tells from rounding, and how long it takes on the examples.

    PYTHONPATH=. python -m tests.benchmarks.verification --out reports/verify.md

A hundred random models are compared in float64 and in float32: once as they are, and then with the
weight of each microbatch in turn one percent too large and too small.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings

import memfit.group
from memfit.batch import weights
from memfit.records import from_json
from memfit.report.verified import percent
from memfit.verification import Verification
from memfit.verify.splits import choose_splits
from tests.verify.test_tolerance import Drawn, drawn, equality_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memfit.verify.worker.equality import Equality

MODELS = 100
PERCENT = 0.01
EXAMPLES: tuple[tuple[str, ...], ...] = (
    ("examples/mlp.py",),
    ("examples/gpt2.py",),
    ("examples/llama.py",),
    ("examples/resnet50.py",),
    ("examples/resnet50.py", "--full-size"),
)


@dataclass(slots=True)
class Tally:
    """What came out in one dtype."""

    splits: int = 0
    alarms: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    visible: list[float] = field(default_factory=list)
    blind: int = 0
    """Models of which MF106 would be said."""


def judge(model: Drawn, tally: Tally) -> None:
    """Compare one model as it is, and with every weight of its first split wrong."""
    equality = equality_of(model)
    splits = choose_splits(model.examples, model.microbatch)
    made = [equality.split(sizes) for sizes in splits]
    tally.splits += len(made)
    tally.alarms += sum(c is None or not c.equal for c in made)
    worst = max((c.visible or math.inf) for c in made if c is not None)
    tally.visible.append(worst)
    tally.blind += worst > PERCENT
    for wrong in range(len(splits[0])):
        for sign in (-1, 1):
            tally.errors[_answer(equality, splits[0], wrong, sign * PERCENT)] += 1


def _answer(equality: Equality, sizes: Sequence[int], wrong: int, by: float) -> str:
    def off(counts: Sequence[int], **facts: Any) -> tuple[float, ...]:
        return tuple(w * (1 + by * (i == wrong)) for i, w in enumerate(weights(counts, **facts)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memfit.group, "weights", off)
        made = equality.split(sizes)
    if made is None or not made.equal:
        return "found"
    return "said to be invisible" if (made.visible or math.inf) > PERCENT else "missed"


def tallies() -> dict[str, Tally]:
    """Judge a hundred random models in both dtypes."""
    found = {"float64": Tally(), "float32": Tally()}

    @settings(
        max_examples=MODELS,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(drawn())
    def each(model: Drawn) -> None:
        for dtype, tally in found.items():
            judge(replace(model, dtype=dtype), tally)

    each()
    torch.set_default_dtype(torch.float32)
    return found


def _rows(found: dict[str, Tally]) -> list[str]:
    rows = [
        "| in | splits, false alarms | errors of one percent | found | said to be invisible | "
        "missed | smallest error seen, median | largest | models with MF106 |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for dtype, tally in found.items():
        each = [str(tally.errors[k]) for k in ("found", "said to be invisible", "missed")]
        rows.append(
            f"| {dtype} | {tally.splits}, {tally.alarms} | {tally.errors.total()} | "
            f"{' | '.join(each)} | {percent(statistics.median(tally.visible))} | "
            f"{percent(max(tally.visible))} | {tally.blind} of {len(tally.visible)} |"
        )
    return rows


def _examples() -> list[str]:
    rows = ["| command | examples | seconds | answer | found |", "|---|---|---|---|---|"]
    for words in EXAMPLES:
        began = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "memfit", "verify", "--json", *words],
            capture_output=True,
            check=False,
        )
        took = time.monotonic() - began
        made = from_json(done.stdout, Verification, origin=words[0])
        codes = ", ".join(f.code for f in made.findings) or "nothing"
        rows.append(
            f"| `memfit verify {' '.join(words)}` | {made.logical_batch} | {took:.1f} | "
            f"{made.outcome} | {codes} |"
        )
    return rows


def main() -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    words = parser.parse_args()
    examples = _examples()
    words.out.write_text(
        "\n".join(
            [
                "# What `memfit verify` can tell",
                "",
                "Made by `PYTHONPATH=. python -m tests.benchmarks.verification --out "
                "reports/verify.md`.",
                "",
                f"{MODELS} random models (up to six layers of six kinds, inputs from a thousandth "
                "to a thousand times",
                "unit size, uneven token counts), each compared as it is, over up to three splits, "
                "and then with the weight",
                "of each microbatch of the first split 1 % too large and too small. *Smallest "
                "error seen* is what the tool",
                "itself says of a comparison; above 1 % it says MF106 and answers *unknown*, "
                "which is exit status 5.",
                "",
                *_rows(tallies()),
                "",
                f"The examples as they are, on {os.cpu_count()} cores with nothing else to do, "
                "from the command to its answer:",
                "",
                *examples,
                "",
                f"torch {torch.__version__}.",
                "",
            ]
        )
    )


if __name__ == "__main__":
    main()
