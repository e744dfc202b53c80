"""The benchmarks of the preference losses as they were run: speed, then memory, in one process.

What the compiled kernel left alive is an inference (`losses.left_alive`), and so is when: after the
rows of speed. Left alive before them, the rows with two examples are higher by 1 MiB.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from tests.accuracy.models import losses
from tests.accuracy.models.bench import Bench, Config, median_peak

CACHE_BYTES = 256_000_000
"""What Triton's timing overwrote between runs at that time, to empty the card's cache."""
TIMED = 7
"""Calls of one timing after its first: five of the estimate, warm-up and timed ones."""


def orpo(*, configs: list[Config]) -> dict[str, list[int]]:
    return _measure(losses.orpo, configs)


def cpo(*, configs: list[Config]) -> dict[str, list[int]]:
    return _measure(losses.cpo, configs)


def simpo(*, configs: list[Config]) -> dict[str, list[int]]:
    return _measure(losses.simpo, configs)


def _measure(build: Callable[[Config], Bench], configs: list[Config]) -> dict[str, list[int]]:
    """Return the median peaks of the reference, batch by batch."""
    for backward in (False, True):
        for config in configs:
            _time(build(config), backward=backward)
    left = losses.left_alive(configs[0])
    peaks = [median_peak(partial(_call, build(config), backward=True)) for config in configs]
    del left
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
