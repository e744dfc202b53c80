"""A workload that keeps memory from group to group, or only seems to.

What it keeps is its parameter `kind`, or what the file says that $LEAK names.
"""

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

import memfit

kept: list[Any] = []
always: list[Any] = []
sometimes: list[Any] = []


class Block(nn.Module):
    def __init__(self, width, kind):
        super().__init__()
        self.inner, self.kind = nn.Linear(width, width), kind
        self.cache = {}

    def forward(self, x):
        key = len(self.cache)
        if self.kind == "cache" and key <= 6:
            self.cache[key] = torch.zeros(2**18, device=x.device)
        if self.kind == "growing cache":
            always.append(torch.zeros(2**18, device=x.device))
        return torch.relu(self.inner(x))


class Leaks(memfit.Workload):
    """Linear blocks with a leak."""

    kind: str = "none"
    width: int = 256
    calls = 0

    def model(self):
        if "LEAK" in os.environ:
            self.kind = Path(os.environ["LEAK"]).read_text()
        return nn.Sequential(*(Block(self.width, self.kind) for _ in range(3)))

    def batch(self, m):
        return torch.randn(m, self.width, device=self.device)

    def loss(self, model, batch):
        self.calls += 1
        loss = model(batch).square().mean()
        if self.kind == "graph":
            kept.append(model(batch).mean())  # a metric with the whole graph behind it
        if self.kind == "losses":
            kept.append(loss.detach())
        if self.kind == "now and then" and self.calls % 4 == 0:
            sometimes.append(torch.ones(2**18, device=batch.device))
        if self.kind == "cycle":
            ring: list[Any] = [torch.ones(2**18, device=batch.device)]
            ring.append(ring)
        if self.kind == "once" and not kept:
            kept.append(torch.ones(2**20, device=batch.device))
        return loss
