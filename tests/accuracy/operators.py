"""Liger-Kernel's table of single operators, providers torch and huggingface."""

from __future__ import annotations

import json
import math
import struct
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from tests.accuracy.forks import Case
from tests.accuracy.rows import ALLOCATED, Result, Row
from tests.accuracy.store import Store
from tests.accuracy.truth import Truth

NAME = "Single operators"
MIB = 2**20
CARDS = {
    "NVIDIA A100-SXM4-80GB": "a100-80gb",
    "NVIDIA H100 PCIe": "h100-80gb-pcie",
    "NVIDIA H100 80GB HBM3": "h100-80gb",
    "NVIDIA GeForce RTX 3090": "rtx-3090",
    "NVIDIA B200": "b200",
}
RECORDED = {"2024": 5, "2025": 7, "2026": 11}
"""The minor version of torch 2 that was current; the table does not name it."""
PLANS_FROM = 14
"""Convolution plans need cuDNN 9.8, which came with later builds than 2.7's."""
_REMAINDER = (
    "blocks above 1 MiB count the remainder that was not split off, which depends on what earlier "
    "rows of the author's process left in the cache"
)
SCRIPTS = {
    "fused_moe": "tests.accuracy.models.mixture_script:measure",
    "fused_linear_orpo_loss": "tests.accuracy.models.preference_script:orpo",
    "fused_linear_cpo_loss": "tests.accuracy.models.preference_script:cpo",
    "fused_linear_simpo_loss": "tests.accuracy.models.preference_script:simpo",
    "kto_loss": "tests.accuracy.models.preference_script:kto",
    "distill_jsd_loss": "tests.accuracy.models.preference_script:distill_jsd",
}
"""Operators whose rows are measured in one process, in the order of the author's script."""
SCRIPT_TIMEOUT_S = 900
CAUSES = {
    "multi_token_attention": (
        "convolution workspaces come from the installed cuDNN, and the card ran an older one; "
        "versions before 9.8 cannot be asked for a card that is not there"
    ),
    "sparse_multi_token_attention": "a workspace of the convolution, from another cuDNN",
    "fused_neighborhood_attention": _REMAINDER,
    "megatron_rms_norm": "torch 2.7 has no kernel for RMSNorm, and computes it in steps",
    "kto_loss": _REMAINDER,
    "distill_jsd_loss": _REMAINDER,
}
_ROUNDING = (
    "one step of the published single precision: a sum of at most {:,} bytes more or less is alive"
)
INFERRED = (
    "fused_linear_orpo_loss",
    "fused_linear_cpo_loss",
    "fused_linear_simpo_loss",
    "kto_loss",
    "distill_jsd_loss",
)
"""Operators whose rows hold what the rows of a compiled kernel left alive, which is inferred."""


DRIFTS = {
    "rope": (
        "the outer product of positions and rates no longer goes to cuBLAS, whose workspace of "
        "8,519,680 bytes is missed"
    )
}


def compare(truth: Truth, store: Store, torch_version: str) -> Result:
    """Run every row whose operator is written."""
    result = Result(data_set=NAME)
    real = truth.of("Liger-Kernel")
    minor = int(torch_version.split(".")[1])
    if minor < PLANS_FROM:
        before = len(real)
        real = [row for row in real if CARDS[row["gpu"]] != "b200"]
        result.notes.append(
            f"{before - len(real)} rows of a B200 were not run with torch {torch_version}, "
            "whose build has no code for it."
        )
        before = len(real)
        real = [row for row in real if _operator(row) != "fused_moe"]
        result.notes.append(
            f"{before - len(real)} rows of fused_moe, recorded in 2026 by a script that takes "
            f"minutes here, were not run with torch {torch_version}."
        )
    single = [row for row in real if _operator(row) not in SCRIPTS]
    cases = [
        Case(
            function="tests.accuracy.models.operators:measure",
            arguments={
                "operator": _operator(row),
                "config": _config(row),
                "mode": _mode(row),
            },
            card=CARDS[row["gpu"]],
        )
        for row in single
    ]
    for row, answer in zip(single, store.run(cases), strict=True):
        result.rows.append(_row(row, answer.get("value", answer), torch_version))
    for row, answer in _of_scripts([row for row in real if row not in single], store):
        result.rows.append(_row(row, answer, torch_version))
    result.notes.extend(_notes(result.rows, torch_version))
    return result


def _of_scripts(
    rows: list[dict[str, str]], store: Store
) -> Iterator[tuple[dict[str, str], dict[str, Any]]]:
    """Run the scripts whose rows depend on one another, each from its beginning to its end."""
    runs: dict[tuple[str, str], list[dict[str, str]]] = defaultdict(list)
    for row in rows:
        swept = row["seq_or_image"].split("=")[0]
        fixed = {name: value for name, value in _config(row).items() if name != swept}
        runs[_operator(row), json.dumps(fixed)].append(row)
    for (operator, _), of_run in runs.items():
        configs = list({json.dumps(_config(row)): _config(row) for row in of_run}.values())
        case = Case(
            function=SCRIPTS[operator],
            arguments={"configs": configs},
            card=CARDS[of_run[0]["gpu"]],
            timeout_s=SCRIPT_TIMEOUT_S,
        )
        (answer,) = store.run([case])
        for row in of_run:
            if "value" not in answer:
                yield row, answer
                continue
            peaks = answer["value"][_mode(row)]
            yield row, {"peak_allocated_bytes": peaks[configs.index(_config(row))]}


def _notes(rows: list[Row], torch_version: str) -> list[str]:
    inferred = [row for row in rows if row.label.startswith(INFERRED)]
    others = [row for row in rows if row not in inferred]
    return [
        "The routing of fused_moe is computed, not guessed: its script seeds the card's generator, "
        "whose numbers are made here on the CPU. Its rows are measured as the script runs them, in "
        "one process and in order, the compiled implementation's allocations included, since each "
        "row depends on what those before it left in the allocator's cache.",
        f"{len(inferred)} rows of orpo, cpo, simpo, kto and distill_jsd rest on an inference: each "
        "is higher by what one or two calls of the compiled kernel hold, which ran before them in "
        "the same process. For orpo, cpo and simpo that was found from their figures; for kto and "
        "distill_jsd from them and from running Liger's kernel with torch 2.5.1 on a virtual card "
        f"in that order. With torch {torch_version}, {_exact(inferred)} of them are exact, and "
        f"{_exact(others)} of the {len(others)} others.",
    ]


def _exact(rows: list[Row]) -> int:
    return sum(row.exact for row in rows)


def _row(row: dict[str, str], answer: dict[str, Any], torch_version: str) -> Row:
    measured = int(row["value_bytes_or_batch"])
    found = answer.get("peak_allocated_bytes")
    operator = _operator(row)
    return Row(
        data_set=NAME,
        label=f"{operator}, {row['gpu'].removeprefix('NVIDIA ')}, "
        f"{row['seq_or_image']}, {_mode(row)}{_width(_config(row))}",
        metric=ALLOCATED,
        measured=measured,
        found=found,
        torch=torch_version,
        recorded=_recorded(row),
        exact=found is not None and _as_published(found) == _as_published(measured),
        cause=_cause(operator, measured, answer),
        drift=DRIFTS.get(operator, ""),
    )


def _cause(operator: str, measured: int, answer: dict[str, Any]) -> str:
    if "error" in answer:
        return str(answer["error"])
    step = _step(measured)
    if abs(answer["peak_allocated_bytes"] - measured) < step:
        return _ROUNDING.format(step)
    return CAUSES.get(operator, "")


def _mode(row: dict[str, str]) -> str:
    return row["metric"].split("(")[1].removesuffix(")")


def _operator(row: dict[str, str]) -> str:
    return row["model"].split()[0].removeprefix("op:")


def _config(row: dict[str, str]) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(
        row["notes"].split("; benchmark/")[0].removeprefix("config ")
    )
    name, value = row["seq_or_image"].split("=")
    config[name] = int(value)
    return config


def _width(config: dict[str, Any]) -> str:
    names = ("hidden_size", "kernel_size", "dilation", "T")
    return "".join(f", {name} {config[name]}" for name in names if name in config)


def _recorded(row: dict[str, str]) -> float:
    if _operator(row) == "multi_token_attention":
        return PLANS_FROM
    return RECORDED[row["framework_version"].split("(")[1][:4]]


def _step(size: int) -> int:
    """Return by how many bytes neighbouring figures of the table differ."""
    _, exponent = math.frexp(size / MIB)
    return int(MIB * 2.0 ** (exponent - 24))


def _as_published(size: int) -> bytes:
    """The table holds MiB in single precision."""
    return struct.pack("f", size / MIB)
