"""A small language model with a teacher: what the tests of the gate make worse on purpose."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import memfit


class Block(nn.Module):
    """A feed-forward block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(self.norm(x))
        hidden = F.gelu(hidden)
        out: Tensor = x + self.down(hidden)
        return out


class Teacher(nn.Module):
    """A frozen layer that says what to learn."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, 8 * width).requires_grad_(False)
        self.outer = nn.Linear(8 * width, width).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        taught = F.gelu(self.inner(x))
        out: Tensor = self.outer(taught)
        return out


class Network(nn.Module):
    """Blocks between two tied embeddings."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(6))
        self.teacher = Teacher(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.token.weight

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x = self.token(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        with torch.no_grad():
            target = self.teacher(x)
        loss = F.mse_loss(x, target)
        logits = self.head(x)
        return logits, loss


class Distilled(memfit.Workload):
    """The network above on `tokens` tokens."""

    tokens: int = 256
    width: int = 512
    vocabulary: int = 8192

    def model(self) -> nn.Module:
        return Network(self.vocabulary, self.width)

    def batch(self, m: int) -> Tensor:
        return torch.randint(self.vocabulary, (m, self.tokens), device=self.device)

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        logits, distance = model(batch)
        flat = logits.float().flatten(0, 1)
        return F.cross_entropy(flat, batch.flatten()) + distance

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        trained = [p for p in model.parameters() if p.requires_grad]
        return torch.optim.AdamW(trained, lr=1e-3)
