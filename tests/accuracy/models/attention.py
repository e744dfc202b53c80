"""Plain attention, and the four readings of the allocator that were published of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

BATCH = 8


def softmax(x: torch.Tensor) -> torch.Tensor:
    """Softmax over the last dimension, in three steps with a name each."""
    shifted = x - torch.max(x, dim=-1, keepdim=True).values
    exponentials = torch.exp(shifted)
    return exponentials / torch.sum(exponentials, dim=-1, keepdim=True)


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Attention of one head."""
    scores = torch.einsum("...qd,...kd->...qk", query, key) / math.sqrt(query.shape[-1])
    weights = softmax(scores)
    return torch.einsum("...qk,...kd->...qd", weights, value)


def measure(*, length: int, width: int, compiled: bool) -> dict[str, Any]:
    """Warm up, then read the allocator around one forward and backward."""
    function: Callable[..., torch.Tensor] = torch.compile(attend) if compiled else attend
    inputs = [
        torch.randn(BATCH, length, width, device="cuda", requires_grad=True) for _ in range(3)
    ]

    def forward() -> tuple[torch.Tensor, torch.Tensor]:
        for one in inputs:
            one.grad = None
        output = function(*inputs)
        return output, output.sum()

    for _ in range(2):
        output, loss = forward()
        loss.backward()
    for one in inputs:
        one.grad = None
    torch.cuda.reset_peak_memory_stats()
    after_inputs = torch.cuda.memory_allocated()
    output, loss = forward()
    forward_peak = torch.cuda.max_memory_allocated()
    before_backward = torch.cuda.memory_allocated()
    # The graph of the forward pass above is still alive while this one runs.
    _, another = forward()
    another.backward()
    assert output.shape == (BATCH, length, width)
    assert loss.dim() == 0
    return {
        "memory_allocated after inputs bytes": after_inputs,
        "memory_allocated before backward bytes": before_backward,
        "max_memory_allocated forward bytes": forward_peak,
        "max_memory_allocated fwd+bwd bytes": torch.cuda.max_memory_allocated(),
    }
