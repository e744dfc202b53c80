"""timm's training benchmark on an RTX 3090: the largest batch of a ladder that fitted.

"It fits" is hard; "the next rung does not" is soft: rungs were tried downwards in one process, and
any RuntimeError stepped down. The step is that of timm's benchmark script of that time, which ran
backward inside autocast. What torch 1.12 did by default and later versions do not is set here:
gradients are zeroed rather than dropped, SGD loops over parameters, attention is not fused.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
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
    "of then": 1486 * MIB,
}
"""What the context of an RTX 3090 took before CUDA 11.7 loaded kernels one by one.

The lesser of two readings of that card, with torch built for CUDA 11: 1,644 MiB with a tensor of
158 MiB (torch 1.7.1, pytorch#49877), and 1,687 MiB with one of 2 MiB (torch 1.8.2, pytorch#55277).
None was found with torch 1.12. Both are what nvidia-smi shows, which a desktop may share.
"""
TODAY = "of today"
"""The context that memfit charges for the card, with a torch that loads kernels one by one."""
STEPS = 3
KNOWN = {
    ("sebotnet33ts_256", "NHWC", 192): (
        "one block of 3.00 GiB is asked for where 2.97 GiB are free; NCHW at 192 fails here as it "
        "did there"
    ),
    ("tresnet_xl_448", "NHWC", 96): (
        "not the same model: timm of that time normalized and activated in place (InplaceABN), "
        "which the installed one does not"
    ),
}
"""What was found out about single rows."""
SAME = {
    "ig_resnext101_32x48d": "resnext101_32x48d",
    "vit_base_patch16_224_sam": "vit_base_patch16_224",
    "vit_base_patch32_224_sam": "vit_base_patch32_224",
}
"""Models whose names the installed timm takes for others, or no longer takes."""
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
    if find_spec("timm") is None:
        result.notes.append(f"Not tried with torch {torch_version}, beside which is no timm.")
        return result
    ladders = {layout: _rungs(truth, layout) for layout in ("nhwc", "nchw")}
    for (layout, rungs), count in zip(ladders.items(), counts, strict=True):
        others = next(theirs for name, theirs in ladders.items() if name != layout)
        other = {(rung.model, rung.image): rung.batch for rung in others}
        drawn = sample(rungs, count)
        tries = [(rung, batch) for rung in drawn for batch in (rung.batch, rung.above) if batch]
        cases = [_case(rung, batch) for rung, batch in tries]
        for (rung, batch), answer in zip(
            tries, store.run(cases, imports=("timm", "timm.optim")), strict=True
        ):
            value = answer.get("value", {})
            result.ladder.append(
                {
                    "case": _case(rung, batch).arguments,
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
    for before, (name, size) in zip((TODAY, *CONTEXTS), CONTEXTS.items(), strict=False):
        _with_the_context(name, size, before, result, store)
    return result


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


def _with_the_context(name: str, size: int, before: str, result: Result, store: Store) -> None:
    """Judge again where a larger context could matter: above its limit.

    What a smaller context refused is not tried again with a larger one.
    """
    charge, _ = context_charge(find_card(CARD))
    for one in result.ladder:
        one[name] = one[before]
    close = [
        one
        for one in result.ladder
        if one[before] in {"fits", "thrash"} and int(str(one["reserved"])) > TOTAL_BYTES - size
    ]
    cases = [
        Case(
            function=f"{__name__}:step",
            arguments=one["case"],
            card=CARD,
            total_bytes=TOTAL_BYTES - size + charge,
        )
        for one in close
        if isinstance(one["case"], dict)
    ]
    for one, answer in zip(close, store.run(cases, imports=("timm", "timm.optim")), strict=True):
        one[name] = answer.get("value", {}).get("verdict", "error")


def _case(rung: Rung, batch: int) -> Case:
    return Case(
        function=f"{__name__}:step",
        arguments={
            "model": rung.model,
            "image": rung.image,
            "batch": batch,
            "channels_last": rung.channels_last,
        },
        card=CARD,
        total_bytes=TOTAL_BYTES,
    )


def step(*, model: str, image: int, batch: int, channels_last: bool) -> dict[str, Any]:
    """Try a few training steps, and judge them as a trial is judged."""
    import torch
    from timm.layers import set_fused_attn

    set_fused_attn(enable=False)
    error = ""
    built = "meta"
    retries: list[int] = []
    try:
        try:
            _train(model, image, batch, retries, channels_last=channels_last, build_on="meta")
        except torch.OutOfMemoryError:
            raise
        except Exception as first:  # noqa: BLE001  # some models read values while they are built
            built = f"cpu ({type(first).__name__}: {str(first)[:120]})"
            torch.cuda.empty_cache()
            retries.clear()
            _train(model, image, batch, retries, channels_last=channels_last, build_on="cpu")
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


def _train(
    name: str,
    image: int,
    batch: int,
    retries: list[int],
    *,
    channels_last: bool,
    build_on: str,
) -> None:
    import timm
    import torch
    from timm.optim import create_optimizer_v2

    layout = torch.channels_last if channels_last else torch.contiguous_format
    with torch.device(build_on):
        model = _create(timm, name, image)
    if build_on == "meta":
        model = model.to(memory_format=layout).to_empty(device="cuda")
    else:
        model = model.to("cuda", memory_format=layout)
    model.train()
    optimizer = create_optimizer_v2(model, opt="sgd", lr=1e-4, foreach=False)
    inputs = torch.randn(batch, 3, image, image, device="cuda").contiguous(memory_format=layout)
    loss_function = torch.nn.CrossEntropyLoss()
    for _ in range(STEPS):
        optimizer.zero_grad(set_to_none=False)
        # Backward runs inside as well: the copies that autocast makes of weights live until then.
        with torch.autocast("cuda", torch.float16):
            outputs = model(inputs)
            if isinstance(outputs, tuple | list):
                outputs = outputs[0]
            targets = torch.zeros(batch, device="cuda", dtype=torch.long)
            loss_function(outputs, targets).backward()
        optimizer.step()
        retries.append(torch.cuda.memory_stats()["num_alloc_retries"])


def _create(timm: Any, name: str, image: int) -> Any:
    """Create the model for an image size, whether or not its class takes one."""
    name = SAME.get(name, name)
    with contextlib.suppress(TypeError):
        return timm.create_model(name, img_size=image)
    return timm.create_model(name)
