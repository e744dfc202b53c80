"""The benchmark of a mixture of experts as it was run: one process, row after row.

Blocks above 1 MiB count the remainder that was not split off, so a row's peak depends on what
earlier rows left in the allocator's cache. The script's order is followed, then: a probe of the
memory needed, the first call of the compiled implementation with the tuning of its kernels, the
speed of both implementations, and their memory. What Liger-Kernel's own implementation allocates is
restated here; its kernels would be given sizes that only they compute.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch

from tests.accuracy.models import mixture
from tests.accuracy.models.bench import Bench, Config, median_peak

MODES = ("full", "forward", "backward")
TILE = 64
"""Tokens of one tile of the kernels."""
ROUTED_AT_ONCE = 1024
"""Choices that one block of the routing kernel counts."""
CACHE_BYTES = 256 * 2**20
"""What Triton's timing overwrites between runs, to empty the card's cache."""
TIMED = (1, 5, 1, 1)
"""Calls of one timing: the first, those of the estimate, warm-up and timed ones, at the least."""


def measure(*, configs: list[Config]) -> dict[str, list[int]]:
    """Return the median peaks of the reference, by mode, of the rows of one sweep."""
    _probe(configs[0])
    tuned: set[str] = set()
    warmed = configs if configs[0]["sweep_dim"] == "E" else [{**configs[0], "T": 8192}]
    for config in warmed:
        bench = compiled(config, tuned)
        output = bench.forward()
        output.sum().backward()
        del bench, output
    builds: tuple[Callable[[Config], Bench], ...] = (
        lambda config: compiled(config, tuned),
        mixture.fused_moe,
    )
    for mode in MODES:
        for build in builds:
            for config in configs:
                _time(build(config), mode)
    peaks: dict[str, list[int]] = {}
    for mode in MODES:
        for build in builds:
            peaks[mode] = [_median_peak(build(config), mode) for config in configs]
    return peaks


def _probe(config: Config) -> None:
    bench = mixture.fused_moe({**config, "T": 8192, "E": 128})
    output = bench.forward()
    output.backward(bench.gradient())
    del bench, output
    gc.collect()
    torch.cuda.empty_cache()


def _call(bench: Bench, mode: str) -> Callable[[], Any]:
    if mode == "forward":
        return bench.forward
    if mode == "backward":
        output = bench.forward()
        gradient = bench.gradient()
        return lambda: bench.backward(output, gradient)

    def full() -> None:
        output = bench.forward()
        bench.backward(output, bench.gradient())

    return full


def _time(bench: Bench, mode: str) -> None:
    call = _call(bench, mode)
    first, estimate, warm_up, timed = TIMED
    for _ in range(first):
        call()
    overwritten = torch.empty(CACHE_BYTES, dtype=torch.uint8, device="cuda")
    for _ in range(estimate + warm_up):
        call()
    for _ in range(timed):
        for leaf in (bench.kept[0], bench.kept[-1]):
            leaf.grad = None
        call()
    del overwritten


def _median_peak(bench: Bench, mode: str) -> int:
    call = _call(bench, mode)
    return median_peak(call)


def compiled(config: Config, tuned: set[str]) -> Bench:
    """Return the compiled implementation; the first call of each of its kernels is a tuning."""
    x, gates, downs, chosen, weights, leaves = mixture.inputs(config)
    tiles = sum(-(-count // TILE) for count in mixture.routed(config))
    return Bench(
        lambda: _Compiled.apply(x, gates, downs, chosen, weights, tiles, tuned),
        lambda: torch.randn_like(x),
        kept=leaves,
    )


def _tune(kernel: str, tuned: set[str]) -> None:
    if kernel not in tuned:
        tuned.add(kernel)
        torch.empty(CACHE_BYTES, dtype=torch.uint8, device="cuda")


def _indices(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int32, device="cuda")


class _Compiled(torch.autograd.Function):
    """What Liger-Kernel's function allocates, in its order."""

    @staticmethod
    def forward(  # autograd passes them by position
        ctx: Any,
        x: torch.Tensor,
        gates: torch.Tensor,
        downs: torch.Tensor,
        chosen: torch.Tensor,
        weights: torch.Tensor,
        tiles: int,
        tuned: set[str],
    ) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        experts, width, hidden = downs.shape
        rows = chosen.numel()
        counts = _indices(experts, -(-chosen.shape[0] // (ROUTED_AT_ONCE // chosen.shape[1])))
        totals = counts.sum(1, dtype=torch.int32)
        starts, offsets = (_indices(experts + 1) for _ in range(2))
        of_tiles = [_indices(tiles) for _ in range(2)]
        of_rows = [_indices(rows) for _ in range(3)]
        del counts, totals, offsets
        before = torch.empty(rows, 2 * hidden, dtype=x.dtype, device="cuda")
        after = torch.empty(rows, hidden, dtype=x.dtype, device="cuda")
        _tune("up", tuned)
        each = torch.empty(rows, width, dtype=x.dtype, device="cuda")
        _tune("down", tuned)
        flat = weights.flatten().contiguous()
        out = torch.empty_like(x)
        _tune("gather, weighted", tuned)
        ctx.save_for_backward(gates, downs, before, flat, x, starts, *of_tiles, *of_rows)
        ctx.shape = weights.shape
        ctx.tuned = tuned
        del after, each
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gates, downs, before, flat, x, *_ = ctx.saved_tensors
        gradient = gradient.contiguous()  # that of a sum is one number, seen as many
        rows, kind = before.shape[0], gradient.dtype
        of_before = torch.empty(before.shape, dtype=kind, device="cuda")
        weighted = torch.empty(rows, downs.shape[2], dtype=kind, device="cuda")
        of_weights = torch.zeros(flat.shape, dtype=kind, device="cuda")
        _tune("down, backward", ctx.tuned)
        of_downs = torch.zeros_like(downs)
        _tune("down, weights", ctx.tuned)
        of_each = torch.empty(rows, x.shape[1], dtype=kind, device="cuda")
        _tune("input", ctx.tuned)
        of_x = torch.zeros(x.shape, dtype=kind, device="cuda")
        _tune("gather", ctx.tuned)
        of_gates = torch.zeros_like(gates)
        _tune("up, weights", ctx.tuned)
        del of_before, weighted, of_each
        return of_x, of_gates, of_downs, None, of_weights.view(ctx.shape), None, None
