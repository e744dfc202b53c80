"""Batch normalization and activation in place (Rota Bulò, Porzi and Kontschieder, 2018).

timm's TResNets need it, and its package builds kernels of its own. Here is what it allocates: the
output overwrites the input; backward makes the normalized values and a gradient, and turns that
gradient into the input's. The arithmetic is left out, since no kernel of a virtual GPU computes.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import torch
from torch.autograd.function import once_differentiable


class InPlaceABN(torch.autograd.Function):
    """The operator, as far as memory is concerned."""

    @staticmethod
    def forward(  # autograd passes them by position
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        running_mean: torch.Tensor,
        running_var: torch.Tensor,
        momentum: float,
    ) -> torch.Tensor:
        """Take the statistics of the batch, and overwrite it."""
        mean, var = (
            torch.empty(x.shape[1], device=x.device, dtype=torch.float32) for _ in range(2)
        )
        count = torch.full((1,), x.numel() // x.shape[1], device=x.device)
        samples = count.to(var.dtype)
        running_mean.mul_(1 - momentum).add_(momentum * mean)
        running_var.mul_(1 - momentum).add_(momentum * var * samples / (samples - 1))
        ctx.save_for_backward(x, var, count, weight, bias)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Make the gradients of the input, of the scale and of the shift."""
        y, var, _, weight, _ = ctx.saved_tensors
        normalized, of_input = torch.empty_like(y), torch.empty_like(y)
        of_bias, of_weight = torch.empty_like(var), torch.empty_like(var)
        of_weight[weight < 0] *= -1
        del normalized, gradient
        return of_input, of_weight, of_bias, None, None, None


def inplace_abn(  # the package's signature
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    running_mean: torch.Tensor,
    running_var: torch.Tensor,
    training: bool = True,
    momentum: float = 0.1,
    *_: Any,
) -> torch.Tensor:
    """Normalize and activate `x` in place."""
    out = InPlaceABN.apply(x, weight, bias, running_mean, running_var, momentum)
    assert isinstance(out, torch.Tensor)
    return out


def _install() -> None:
    """Make the package importable, as if it were there."""
    package, functions = ModuleType("inplace_abn"), ModuleType("inplace_abn.functions")
    vars(functions).update(inplace_abn=inplace_abn, inplace_abn_sync=inplace_abn)
    vars(package).update(functions=functions)
    sys.modules.update({"inplace_abn": package, "inplace_abn.functions": functions})


_install()
