"""What the items share: training a model for real, and saying when something was not trained."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

CARD = torch.device("cuda")


def random(*shape: int, **options: Any) -> torch.Tensor:
    """Make a tensor on the card."""
    return torch.randn(*shape, device=CARD, **options)


def integers(limit: int, *shape: int) -> torch.Tensor:
    """Make class numbers or tokens on the card."""
    return torch.randint(limit, shape, device=CARD)


def train(
    model: nn.Module,
    loss: Callable[[], torch.Tensor],
    *,
    optimizer: torch.optim.Optimizer | None = None,
    autocast: torch.dtype | None = None,
    steps: int = 2,
) -> None:
    """Take optimizer steps, and make sure that every parameter took part in them."""
    if optimizer is None:
        optimizer = torch.optim.AdamW(model.parameters())
    cast = torch.autocast("cuda", autocast) if autocast else contextlib.nullcontext()
    for _ in range(steps):
        with cast:
            value = loss()
        value.backward()
        missed = [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None]
        assert not missed, f"no gradient for {missed}"
        optimizer.step()
        optimizer.zero_grad()
    trained = sum(p.requires_grad for p in model.parameters())
    assert len(optimizer.state) == trained, f"{len(optimizer.state)} states of {trained}"


def classify(model: nn.Module, inputs: torch.Tensor, classes: int) -> Callable[[], torch.Tensor]:
    """Return the usual loss of a classifier over the model's last dimension."""

    def loss() -> torch.Tensor:
        scores = model(inputs)
        labels = integers(classes, scores[..., 0].numel())
        return nn.functional.cross_entropy(scores.flatten(0, -2), labels)

    return loss
