"""A workload whose every line that allocates is known.

Microbatches of 5 run with reentrant checkpoints, those of 6 with others, and those of 7 read a
value that only a kernel knows, so that one process serves all of them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import memfit


class Block(nn.Module):
    """Two linear layers around a gelu."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 16 * width)
        self.down = nn.Linear(16 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        hidden = F.gelu(hidden)
        result: Tensor = self.down(hidden)
        return result


class Network(nn.Module):
    """Blocks, and a layer at the end."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.head = nn.Linear(width, width)
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("table", torch.zeros(1024))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if x.shape[0] == 5:
                x = checkpoint(block, x, use_reentrant=True)
            elif x.shape[0] == 6:
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        out: Tensor = self.head(x)
        return out * self.scale


class Places(memfit.Workload):
    """A small network."""

    width: int = 128

    def model(self) -> nn.Module:
        return Network(self.width)

    def batch(self, m: int) -> Tensor:
        return torch.randn(m, 256, self.width, device=self.device).requires_grad_()

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        out: Tensor = model(batch)
        if len(batch) == 7 and out.sum().item() == 0:
            return out.sum()
        return out.square().mean()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-3)
