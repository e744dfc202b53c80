"""A workload with a heavy evaluation, unlike batches or a compiled model, as $UNLIKE says."""

import os
from pathlib import Path

import torch
from torch import nn

import memfit


class Unlike(memfit.Workload):
    """Linear layers."""

    width: int = 256
    calls = 0

    @property
    def kind(self):
        return Path(os.environ["UNLIKE"]).read_text()

    def model(self):
        made = nn.Sequential(nn.Linear(self.width, self.width), nn.ReLU(), nn.Linear(self.width, 1))
        if self.kind == "compiled":
            return torch.compile(made, backend="aot_eager")
        if self.kind == "on the host":
            made.register_buffer("table", torch.ones(180, 2**20, device="cpu"))
        return made

    def batch(self, m):
        self.calls += 1
        rows = 1 + self.calls % 3 if self.kind in ("shapes", "recompiled") else 1
        return torch.randn(m, rows, self.width, device=self.device)

    def loss(self, model, batch):
        return model(batch).square().mean()

    def count(self, batch):
        return batch.shape[0] * batch.shape[1]

    def evaluate(self, model, batch):
        assert not model.training
        if self.kind == "heavy":
            return torch.empty(2**31, device=self.device), torch.empty(2**31, device=self.device)
        with torch.no_grad():
            return model(batch)
