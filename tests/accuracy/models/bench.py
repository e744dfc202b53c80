"""What every single operator is written with: its call, its gradient, and what stays alive."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Config = dict[str, Any]
CALLS = 10
"""Calls of which a row tells the median peak."""


@dataclass(frozen=True, slots=True)
class Bench:
    """One operator, ready to be called."""

    forward: Callable[[], Any]
    gradient: Callable[[], Any] = lambda: None
    """Makes the gradient of the output; the default is that of a scalar."""
    inputs: tuple[torch.Tensor, ...] = ()
    """Where only the gradients of these are wanted, and they are not kept."""
    retain: bool = True
    """Whether the graph stays after backward."""
    kept: tuple[Any, ...] = ()
    """What else is alive while the operator is measured."""

    def backward(self, output: Any, gradient: Any) -> None:
        """Run backward once."""
        if self.inputs:
            torch.autograd.grad(output, self.inputs, gradient, retain_graph=self.retain)
        else:
            output.backward(gradient, retain_graph=self.retain)


def median_peak(call: Callable[[], Any]) -> int:
    """Return the median of the peaks of ten calls, in bytes."""
    peaks = []
    for _ in range(CALLS):
        torch.cuda.reset_peak_memory_stats()
        call()
        peaks.append(torch.cuda.max_memory_allocated())
    peaks.sort()
    return (peaks[CALLS // 2 - 1] + peaks[CALLS // 2]) // 2


def dtype_of(config: Config) -> torch.dtype:
    """Return the type that a row's configuration names; single precision where it names none."""
    kind = getattr(torch, config.get("dtype", "torch.float32").removeprefix("torch."))
    assert isinstance(kind, torch.dtype)
    return kind


def random(*shape: int, config: Config, gradient: bool = False) -> torch.Tensor:
    """Return random numbers of the configuration's type."""
    return torch.randn(shape, device="cuda", dtype=dtype_of(config), requires_grad=gradient)
