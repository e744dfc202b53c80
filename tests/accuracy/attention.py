"""A published table of plain attention: four readings for each of 20 shapes, eager and compiled.

The card was not named. With compute capability 9.0 every figure would be higher by the difference
of the cuBLAS workspaces, 47.75 MiB; an A100 stands for the card.
"""

from __future__ import annotations

from tests.accuracy.forks import Case
from tests.accuracy.rows import Result, Row
from tests.accuracy.store import Store
from tests.accuracy.truth import Truth

NAME = "Attention table"
MIB = 2**20
COMPILES_FROM = 14
"""Compiled rows run with torch 2.14 and later; an earlier one has not been tried."""


def compare(truth: Truth, store: Store, torch_version: str) -> Result:
    """Run all shapes."""
    result = Result(data_set=NAME)
    real = truth.of("damek/cs336")
    compiles = int(torch_version.split(".")[1]) >= COMPILES_FROM
    if not compiles:
        real = [row for row in real if "compile" not in row["precision"]]
        result.notes.append(f"The compiled rows were not run with torch {torch_version}.")
    shapes = list(dict.fromkeys((row["seq_or_image"], row["precision"]) for row in real))
    cases = []
    for shape, precision in shapes:
        length, width = (int(part.split("=")[1]) for part in shape.split())
        cases.append(
            Case(
                function="tests.accuracy.models.attention:measure",
                arguments={
                    "length": length,
                    "width": width,
                    "compiled": "compile" in precision,
                },
                timeout_s=300,
            )
        )
    answers = dict(zip(shapes, store.run(cases), strict=True))
    for row in real:
        answer = answers[row["seq_or_image"], row["precision"]]
        measured = int(row["value_bytes_or_batch"])
        found = answer["value"][row["metric"]] if "value" in answer else None
        result.rows.append(
            Row(
                data_set=NAME,
                label=f"{row['seq_or_image']}, {row['precision']}",
                metric=row["metric"].removesuffix(" bytes"),
                measured=measured,
                found=found,
                torch=torch_version,
                recorded=6,
                # Six significant digits of MiB were printed.
                exact=found is not None and f"{found / MIB:.6g}" == f"{measured / MIB:.6g}",
                cause=answer.get("error", ""),
            )
        )
    return result
