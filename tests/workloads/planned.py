"""A stack of layers to be planned: it can recompute, fails above a width, and waits at a gate.

The file named by GATE may hold `WIDTH:SIZE`: a trial of that microbatch at that width then hangs,
with `reached` beside the file.
"""

import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import memfit


class Planned(memfit.Workload):
    width: int = 512
    depth: int = 4
    checkpointing: bool = False

    def model(self):
        if self.width > 5000:
            raise ValueError(f"{self.width} is too wide")
        layers = [
            nn.Sequential(nn.Linear(self.width, self.width), nn.GELU()) for _ in range(self.depth)
        ]
        return nn.ModuleList(layers)

    def batch(self, m):
        return torch.ones(m, 16, self.width, device=self.device)

    def loss(self, model, batch):
        self._wait_at_the_gate(len(batch))
        x = batch
        for layer in model:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointing else layer(x)
        return x.square().mean()

    def _wait_at_the_gate(self, m):
        gate = Path(os.environ.get("GATE", "nowhere"))
        if gate.exists() and gate.read_text() == f"{self.width}:{m}":
            gate.with_suffix(".reached").touch()
            time.sleep(600)
