"""A small classifier as plain functions: memfit needs no class.

memfit probe examples/mlp.py --device cpu --memory-limit 1GiB
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)
    )


def batch(m: int) -> tuple[Tensor, Tensor]:
    return torch.randn(m, 784), torch.randint(10, (m,))


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    images, labels = batch
    return F.cross_entropy(model(images), labels)
