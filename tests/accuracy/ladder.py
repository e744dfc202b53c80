"""timm's training benchmark on an RTX 3090: the largest batch of a ladder that fitted.

"It fits" is hard; "the next rung does not" is soft: rungs were tried downwards in one process, and
any RuntimeError stepped down. The models are those of timm 0.6, which that benchmark ran, and the
step is that of its script, which ran backward inside autocast. What torch 1.12 did by default and
later versions do not is set here: gradients are zeroed rather than dropped, SGD loops over
parameters. Each rung has a process of its own; where its verdict is unlike the real one, the ladder
is also descended in one process, as it was there.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from memfit.units import MIB
from memfit.virtual import context_charge, find_card
from tests.accuracy.forks import Case
from tests.accuracy.rows import Result
from tests.accuracy.store import Store
from tests.accuracy.truth import Truth

NAME = "timm on an RTX 3090"
LADDER = (512, 384, 256, 192, 128, 96, 64, 48, 32, 24, 16, 12, 8, 6, 4, 3, 2, 1)
CARD = "rtx-3090"
TOTAL_BYTES = 25_447_170_048
"""24,268 MiB: what the drivers of that time showed of the card."""
CONTEXTS = {
    "torch 1.8.2": 1685 * MIB,
    "torch 1.7.1": 1486 * MIB,
}
"""What the context of an RTX 3090 took while CUDA loaded all kernels at once; nearest first.

Readings with torch built for CUDA 11: 1,687 MiB with a tensor that takes 2 MiB (torch 1.8.2,
pytorch#55277), and 1,644 MiB with one of 158 MiB (torch 1.7.1, pytorch#49877). None was found with
1.12, which CUDA 11.3 served the same way: kernels one by one came with CUDA 11.7. Both are what
nvidia-smi shows, before the first convolution, whose library brings kernels of its own.
"""
TODAY = "today"
"""The context that memfit charges for the card, with a torch that loads kernels one by one."""
DESCENDING = "descending"
"""The verdict where the rungs above were tried before, in the same process."""
RUNS = ("fits", "thrash")
"""Verdicts that the benchmark took for a success: it ended without an error."""
STEPS = 3
IMPORTS = ("tests.accuracy.models.inplace_abn", __name__, "timm", "timm.optim")
"""In this order: timm looks for the package of in-place normalization when it is imported."""
KNOWN = {
    ("sebotnet33ts_256", "NHWC", 192): (
        "fragmentation: 20,468,173,312 bytes are its peak where all fits, and with expandable "
        "segments it runs here in every context; without, a block of 3.00 GiB finds no room. "
        "cuDNN's trials of that benchmark, each of which flushed the cache, are left out here; "
        "with them two steps run before the same block is refused. NCHW at 192 fails, as there"
    ),
    ("dm_nfnet_f4", "NCHW", 24): (
        "fragmentation: 23,440,414,720 bytes are its peak with expandable segments, with which it "
        "runs here in the same context; with cuDNN's trials of that benchmark the first step is "
        "refused as well"
    ),
}
"""What was found out about single rows."""
TIMM = "0.6."
"""The versions whose models the benchmark ran."""
MOST_ROWS = 200
"""The longest sample of one layout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """One row: a model and the largest batch that fitted."""

    model: str
    image: int
    batch: int
    channels_last: bool

    @property
    def above(self) -> int | None:
        """The next larger batch, which failed; None where the row is the ladder's top."""
        place = LADDER.index(self.batch)
        return LADDER[place - 1] if place else None


def sample(rows: list[Rung], count: int, *, seed: int = 0) -> list[Rung]:
    """Draw rows at random: the first of an order that is the same every time."""
    ordered = sorted(rows, key=lambda row: (row.model, row.image))
    return random.Random(seed).sample(ordered, min(MOST_ROWS, len(ordered)))[:count]


def compare(truth: Truth, store: Store, torch_version: str, *, counts: Sequence[int]) -> Result:
    """Try the batch that fitted and the next rung, for a random sample of each memory layout."""
    result = Result(data_set=NAME)
    found = _timm()
    if found is None or not found.startswith(TIMM):
        beside = f"timm {found}, whose models are others" if found else "no timm"
        result.notes.append(f"Not tried with torch {torch_version}, beside which is {beside}.")
        return result
    ladders = {layout: _rungs(truth, layout) for layout in ("nhwc", "nchw")}
    for (layout, rungs), count in zip(ladders.items(), counts, strict=True):
        others = next(theirs for name, theirs in ladders.items() if name != layout)
        other = {(rung.model, rung.image): rung.batch for rung in others}
        drawn = sample(rungs, count)
        tries = [(rung, batch) for rung in drawn for batch in (rung.batch, rung.above) if batch]
        cases = [_step_case(_arguments(rung, batch)) for rung, batch in tries]
        for (rung, batch), answer in zip(tries, store.run(cases, imports=IMPORTS), strict=True):
            value = answer.get("value", {})
            result.ladder.append(
                {
                    "case": _arguments(rung, batch),
                    "model": rung.model,
                    "image": rung.image,
                    "layout": layout.upper(),
                    "batch": batch,
                    "fitted_there": batch == rung.batch,
                    "other_layout_there": other.get((rung.model, rung.image), 0),
                    "verdict": value.get("verdict", "error"),
                    TODAY: value.get("verdict", "error"),
                    "error": answer.get("error") or value.get("error", ""),
                    "retries": value.get("retries", []),
                    "reserved": value.get("peak_reserved_bytes"),
                    "allocated": value.get("peak_allocated_bytes"),
                }
            )
    for name, size in sorted(CONTEXTS.items(), key=lambda context: context[1]):
        _with_the_context(name, size, result, store)
    _in_one_process(result, store)
    return result


def _timm() -> str | None:
    try:
        return version("timm")
    except PackageNotFoundError:
        return None


def _rungs(truth: Truth, layout: str) -> list[Rung]:
    return [
        Rung(
            model=row["model"],
            image=int(row["seq_or_image"]),
            batch=int(row["value_bytes_or_batch"]),
            channels_last=layout == "nhwc",
        )
        for row in truth.of("timm")
        if layout in row["precision"]
    ]


def _with_the_context(name: str, size: int, result: Result, store: Store) -> None:
    """Judge again where a larger context could matter: where more is reserved than it leaves.

    What the context of today refuses is not tried again with a larger one.
    """
    for one in result.ladder:
        one[name] = one[TODAY]
    close = [
        one
        for one in result.ladder
        if one[TODAY] in RUNS and int(str(one["reserved"])) > TOTAL_BYTES - size
    ]
    cases = [_beside(size, _step_case(one["case"])) for one in close]
    for one, answer in zip(close, store.run(cases, imports=IMPORTS), strict=True):
        one[name] = answer.get("value", {}).get("verdict", "error")


def _beside(context: int, case: Case) -> Case:
    """Return the case on a card whose context takes that many bytes."""
    charge, _ = context_charge(find_card(CARD))
    return replace(case, total_bytes=TOTAL_BYTES - context + charge)


def unlike(one: dict[str, object], context: str) -> bool:
    """Tell whether a rung ran on one of the two cards only."""
    return one[context] != "error" and (one[context] in RUNS) != one["fitted_there"]


def _in_one_process(result: Result, store: Store) -> None:
    """Descend the ladder in one process to the rungs that are unlike the real ones."""
    nearest, size = next(iter(CONTEXTS.items()))
    rungs = [one for one in result.ladder if unlike(one, nearest)]
    cases = [
        _beside(size, replace(_step_case(one["case"]), function=f"{__name__}:descend"))
        for one in rungs
    ]
    for one, answer in zip(rungs, store.run(cases, imports=IMPORTS), strict=True):
        one[DESCENDING] = answer.get("value", {}).get("verdict", "error")


def _arguments(rung: Rung, batch: int) -> dict[str, Any]:
    return {
        "model": rung.model,
        "image": rung.image,
        "batch": batch,
        "channels_last": rung.channels_last,
    }


def _step_case(arguments: object) -> Case:
    assert isinstance(arguments, dict)
    return Case(
        function=f"{__name__}:step", arguments=arguments, card=CARD, total_bytes=TOTAL_BYTES
    )


def step(*, model: str, image: int, batch: int, channels_last: bool) -> dict[str, Any]:
    """Try a few training steps, and judge them as a trial is judged."""
    import torch

    error = ""
    built = "meta"
    retries: list[int] = []

    def train(build_on: str) -> None:
        _Training(model, image, batch, channels_last=channels_last, build_on=build_on).run(retries)

    try:
        try:
            train("meta")
        except torch.OutOfMemoryError:
            raise
        except Exception as first:  # noqa: BLE001  # some models read values while they are built
            built = f"cpu ({type(first).__name__}: {str(first)[:120]})"
            torch.cuda.empty_cache()
            retries.clear()
            train("cpu")
    except torch.OutOfMemoryError as full:
        error = str(full).splitlines()[0][:160]
    stats = torch.cuda.memory_stats()
    thrashes = not error and retries[-1] > retries[-2]
    return {
        "verdict": "oom" if error else "thrash" if thrashes else "fits",
        "error": error,
        "built_on": built,
        "retries": retries,
        "peak_allocated_bytes": stats.get("allocated_bytes.all.peak", 0),
        "peak_reserved_bytes": stats.get("reserved_bytes.all.peak", 0),
    }


def descend(*, model: str, image: int, batch: int, channels_last: bool) -> dict[str, Any]:
    """Try the rungs above one, then this one, as the benchmark did, and judge the last.

    While the model of a rung is built, that of the rung before is still alive.
    """
    import torch

    verdict = ""
    for rung in LADDER[: LADDER.index(batch) + 1]:
        torch.cuda.empty_cache()
        retries: list[int] = []
        try:
            tried = _Training(model, image, rung, channels_last=channels_last)
            tried.run(retries)
        except torch.OutOfMemoryError:
            verdict = "oom"
        else:
            verdict = "thrash" if retries[-1] > retries[-2] else "fits"
    return {"verdict": verdict}


class _Training:
    """One model with its optimizer and its batch on the card."""

    def __init__(
        self, name: str, image: int, batch: int, *, channels_last: bool, build_on: str = ""
    ) -> None:
        import torch
        from timm.optim import create_optimizer_v2

        self._layout = torch.channels_last if channels_last else torch.contiguous_format
        self._shape = (batch, 3, image, image)
        self._model = self._build(name, build_on) if build_on else self._build_anyhow(name)
        self._model.train()
        self._optimizer = create_optimizer_v2(self._model, opt="sgd", lr=1e-4, foreach=False)

    def _build_anyhow(self, name: str) -> Any:
        import torch

        try:
            return self._build(name, "meta")
        except torch.OutOfMemoryError:
            raise
        except Exception:  # noqa: BLE001  # some models read values while they are built
            return self._build(name, "cpu")

    def _build(self, name: str, device: str) -> Any:
        import timm
        import torch

        with torch.device(device):
            model = timm.create_model(name, drop_rate=0.0)
        if device == "meta":
            return model.to(memory_format=self._layout).to_empty(device="cuda")
        return model.to("cuda", memory_format=self._layout)

    def run(self, retries: list[int]) -> None:
        """Train a few steps, noting after each how often the cache was flushed so far."""
        import torch

        inputs = torch.randn(self._shape, device="cuda").contiguous(memory_format=self._layout)
        loss_function = torch.nn.CrossEntropyLoss()
        for _ in range(STEPS):
            self._optimizer.zero_grad(set_to_none=False)
            # Backward runs inside too: the copies that autocast makes of weights live until then.
            with torch.autocast("cuda", torch.float16):
                outputs = self._model(inputs)
                if isinstance(outputs, tuple):
                    outputs = outputs[0]
                targets = torch.zeros(self._shape[0], device="cuda", dtype=torch.long)
                loss_function(outputs, targets).backward()
            self._optimizer.step()
            retries.append(torch.cuda.memory_stats()["num_alloc_retries"])
