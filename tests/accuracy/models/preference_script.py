"""The benchmarks of losses that have a compiled kernel, as they were run: speed, then memory.

What the compiled kernel left alive in their one process is an inference (`left.py`), and so is
when: after the rows of speed. Left alive before them, the rows of the preference losses with two
examples are higher by 1 MiB.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from tests.accuracy.models import left, losses
from tests.accuracy.models.bench import Bench, Config, median_peak

CACHE_BYTES = 256_000_000
"""What Triton's timing overwrote between runs at that time, to empty the card's cache."""
TIMED = 7
"""Calls of one timing after its first: five of the estimate, warm-up and timed ones."""


def orpo(*, configs: list[Config]) -> dict[str, list[int]]:
    return _measure(losses.orpo, configs, left.by_a_pair)


def cpo(*, configs: list[Config]) -> dict[str, list[int]]:
    return _measure(losses.cpo, configs, left.by_a_pair)


def simpo(*, configs: list[Config]) -> dict[str, list[int]]:
    return _measure(losses.simpo, configs, left.by_a_pair)


def kto(*, configs: list[Config]) -> dict[str, list[int]]:
    return _measure(losses.kto, configs, left.by_unpaired)


def distill_jsd(*, configs: list[Config]) -> dict[str, list[int]]:
    return _measure(losses.distill_jsd, configs, left.by_distillation)


def _measure(
    build: Callable[[Config], Bench],
    configs: list[Config],
    leave: Callable[[Config], list[torch.Tensor]],
) -> dict[str, list[int]]:
    """Return the median peaks of the reference, batch by batch."""
    for backward in (False, True):
        for config in configs:
            _time(build(config), backward=backward)
    alive = leave(configs[0])
    peaks = [median_peak(partial(_call, build(config), backward=True)) for config in configs]
    del alive
    return {"full": peaks}


def _call(bench: Bench, *, backward: bool) -> None:
    output = bench.forward()
    if backward:
        bench.backward(output, None)


def _time(bench: Bench, *, backward: bool) -> None:
    _call(bench, backward=backward)
    overwritten = torch.empty(CACHE_BYTES, dtype=torch.uint8, device="cuda")
    for _ in range(TIMED):
        _call(bench, backward=backward)
    del overwritten
