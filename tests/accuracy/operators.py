"""Liger-Kernel's table of single operators, providers torch and huggingface."""

from __future__ import annotations

import json
import struct
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
NOT_TRIED = {
    "fused_moe": "which expert computes what was decided by random values on the card",
    "distill_jsd_loss": "its operations could not be told from the figures",
    "kto_loss": "not written yet",
    "fused_linear_grpo_loss_sequence": "not written yet",
}
RECORDED = {"2024": 5, "2025": 7, "2026": 11}
"""The minor version of torch 2 that was current; the table does not name it."""
PLANS_FROM = 14
"""Convolution plans need cuDNN 9.8, which came with later builds than 2.7's."""
CAUSES = {
    "multi_token_attention": (
        "convolution workspaces come from the installed cuDNN, and the card ran an older one"
    ),
    "sparse_multi_token_attention": (
        "the real figure is higher by 8 bytes for each position: one more vector, which this "
        "rewrite does not keep; at 32 positions also a workspace of the convolution"
    ),
    "fused_neighborhood_attention": (
        "blocks above 1 MiB count the remainder that was not split off, which depends on what "
        "earlier rows of the author's process left in the cache"
    ),
    "megatron_rms_norm": "torch 2.7 has no kernel for RMSNorm, and computes it in steps",
    "preference": (
        "the real figure is higher by 2,084.05 MiB at every batch: not of this operator's making, "
        "since it does not depend on the batch; it matches a second head and its gradient, left "
        "by the row before (inferred)"
    ),
    "preference of another length": (
        "the figures at B = 2, 4, 8 and 16 grow as 2,048 tokens would, while the table says 4,096"
    ),
}


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
    for operator, reason in NOT_TRIED.items():
        count = sum(_operator(row) == operator for row in real)
        if count:
            result.notes.append(f"Not tried: {count} rows of {operator}: {reason}.")
    real = [row for row in real if _operator(row) not in NOT_TRIED]
    minor = int(torch_version.split(".")[1])
    if minor < PLANS_FROM:
        before = len(real)
        real = [row for row in real if CARDS[row["gpu"]] != "b200"]
        result.notes.append(
            f"{before - len(real)} rows of a B200 were not run with torch {torch_version}, "
            "whose build has no code for it."
        )
    cases = [
        Case(
            function="tests.accuracy.models.operators:measure",
            arguments={
                "operator": _operator(row),
                "config": _config(row),
                "mode": row["metric"].split("(")[1].removesuffix(")"),
            },
            card=CARDS[row["gpu"]],
        )
        for row in real
    ]
    for row, case, answer in zip(real, cases, store.run(cases), strict=True):
        measured = int(row["value_bytes_or_batch"])
        found = answer["value"]["peak_allocated_bytes"] if "value" in answer else None
        operator = _operator(row)
        result.rows.append(
            Row(
                data_set=NAME,
                label=f"{operator}, {row['gpu'].removeprefix('NVIDIA ')}, "
                f"{row['seq_or_image']}, {case.arguments['mode']}{_width(case)}",
                metric=ALLOCATED,
                measured=measured,
                found=found,
                torch=torch_version,
                recorded=_recorded(row),
                exact=found is not None and _as_published(found) == _as_published(measured),
                cause=_cause(operator, case, answer),
                drift=DRIFTS.get(operator, ""),
            )
        )
    return result


def _operator(row: dict[str, str]) -> str:
    return row["model"].split()[0].removeprefix("op:")


def _config(row: dict[str, str]) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(
        row["notes"].split("; benchmark/")[0].removeprefix("config ")
    )
    name, value = row["seq_or_image"].split("=")
    config[name] = int(value)
    return config


def _width(case: Case) -> str:
    config = case.arguments["config"]
    names = ("hidden_size", "kernel_size", "dilation", "T")
    return "".join(f", {name} {config[name]}" for name in names if name in config)


def _recorded(row: dict[str, str]) -> float:
    if _operator(row) == "multi_token_attention":
        return PLANS_FROM
    return RECORDED[row["framework_version"].split("(")[1][:4]]


def _as_published(size: int) -> bytes:
    """The table holds MiB in single precision."""
    return struct.pack("f", size / MIB)


def _cause(operator: str, case: Case, answer: dict[str, Any]) -> str:
    if "error" in answer:
        return str(answer["error"])
    if operator.startswith("fused_linear_"):
        operator = "preference"
        if case.arguments["config"]["T"] > 1024:
            operator = "preference of another length"
    return CAUSES.get(operator, "")
