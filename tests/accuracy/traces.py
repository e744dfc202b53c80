"""Recorded allocator traces of whole runs: every request in order, and both peaks.

The cards were not named, except that a cuBLAS workspace of 33,554,432 bytes tells a Hopper card
from the others, which take 8,519,680. An A100 stands for those.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from tests.accuracy import recorder
from tests.accuracy.forks import Case
from tests.accuracy.rows import ALLOCATED, RESERVED, Result, Row
from tests.accuracy.store import Store
from tests.accuracy.truth import Truth

NAME = "Traces of whole runs"
COURSE = "NiuHuangxiaozi+assignment2-systems__cs336_systems_profile_memory_"
LINEAR = "shreyansh26+MLSys-Experiments__model_memory_usage_"
DRIFTS = {
    "language_model": (
        "`trunc_normal_` makes temporaries, and the gradient of `logits[:, -1]` is no longer made "
        "over all positions"
    ),
    "linear_layer": "the bias no longer takes a workspace of 1 MiB from the allocator",
}
RUNS: dict[str, tuple[str, dict[str, Any], str, str]] = {
    **{
        f"{COURSE}{kind}_memory_snapshot_{length}{suffix}": (
            "language_model",
            {"length": length, "train": kind != "forward", "mixed": suffix != "."},
            "a100-80gb",
            f"language model, {kind.replace('_', ' ')}, {length} tokens"
            + ("" if suffix == "." else ", mixed precision"),
        )
        for kind in ("forward", "forward_and_backward")
        for length, suffix in ((100, "."), (150, "."), (200, "."), (200, "_mixed_precision"))
    },
    f"{LINEAR}profile_grad": (
        "linear_layer",
        {"gradients": True},
        "h100-80gb",
        "nn.Linear with gradients",
    ),
    f"{LINEAR}profile_no_grad": (
        "linear_layer",
        {"gradients": False},
        "h100-80gb",
        "nn.Linear without gradients",
    ),
    "silmont2000+assignment2-systems__mem_snapshot": (
        "attention",
        {},
        "a100-80gb",
        "attention, 8 x 4096 x 16",
    ),
}


def compare(truth: Truth, store: Store, torch_version: str) -> Result:
    """Run every trace that is there."""
    result = Result(data_set=NAME)
    found = {part: trace for part in RUNS if (trace := truth.trace(part)) is not None}
    missing = len(RUNS) - len(found)
    if missing:
        result.notes.append(f"{missing} traces are not in the folder.")
    if truth.trace("memory_forward_") is not None:
        result.notes.append(
            "Not tried: the two forward passes of silmont2000, which begin in the middle of a run."
        )
    cases = [
        Case(function=f"{__name__}:{RUNS[part][0]}", arguments=RUNS[part][1], card=RUNS[part][2])
        for part in found
    ]
    for (part, trace), answer in zip(found.items(), store.run(cases), strict=True):
        value = answer.get("value")
        sizes = [event[2] for event in trace["events"] if event[0] == "a"]
        for metric, real, key in (
            (ALLOCATED, "peak_alloc", "peak_allocated_bytes"),
            (RESERVED, "peak_res", "peak_reserved_bytes"),
        ):
            measured = trace["measured"][real]
            here = value[key] if value else None
            result.rows.append(
                Row(
                    data_set=NAME,
                    label=RUNS[part][3],
                    metric=metric,
                    measured=measured,
                    found=here,
                    torch=torch_version,
                    recorded=5 if part.startswith(LINEAR) else 6,
                    exact=here == measured,
                    cause=answer.get("error", ""),
                    drift=DRIFTS.get(RUNS[part][0], ""),
                    same_sequence=value["allocations"] == sizes if value else None,
                )
            )
    return result


SHAPE = {
    "vocabulary": 10_000,
    "context": 256,
    "width": 512,
    "layers": 4,
    "heads": 16,
    "hidden": 1344,
}
BATCH = 10
ITERATIONS = 3


def language_model(*, length: int, train: bool, mixed: bool) -> dict[str, Any]:
    """Three iterations of the course's language model from an empty allocator."""
    import torch

    from tests.accuracy.models import transformer

    def precision() -> AbstractContextManager[object]:
        return torch.autocast("cuda", torch.bfloat16) if mixed else nullcontext()

    recorder.start()
    with torch.device("cuda"):
        model = transformer.LanguageModel(**SHAPE)
    optimizer = transformer.Adam(model.parameters()) if train else None
    ids = torch.randint(0, SHAPE["vocabulary"], (BATCH, length)).to("cuda")
    if optimizer is None:
        for _ in range(ITERATIONS):
            with precision():
                model(ids)
        return recorder.stop()
    targets = torch.randint(0, SHAPE["vocabulary"], (BATCH,)).to("cuda")
    # One autocast around all iterations, as recorded: its 16-bit weights are made only once.
    with precision():
        for _ in range(ITERATIONS):
            optimizer.zero_grad()
            logits = model(ids)
            loss = transformer.cross_entropy(logits[:, -1, :], targets)
            loss.backward()
            optimizer.step()
    return recorder.stop()


def linear_layer(*, gradients: bool) -> dict[str, Any]:
    """Three forwards of one wide linear layer."""
    import torch

    recorder.start()
    layer = torch.nn.Linear(10_000, 50_000, device="cuda")
    with torch.set_grad_enabled(gradients):
        for _ in range(3):
            inputs = torch.randn(5000, 10_000, device="cuda")
            outputs = layer(inputs)
    assert outputs.shape == (5000, 50_000)
    return recorder.stop()


def attention() -> dict[str, Any]:
    """Attention of 8 heads of 16 features over 4,096 positions, forward and backward."""
    import torch

    from tests.accuracy.models import transformer

    recorder.start()
    query, key, value = (
        torch.randn(8, 4096, 16, device="cuda", requires_grad=True) for _ in range(3)
    )
    mixed = transformer.plain_attention(query, key, value)
    loss = mixed.sum()
    loss.backward()
    return recorder.stop()
