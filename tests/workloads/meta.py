"""A layer whose builder first computes on the meta device, in the way that `uses` says."""

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import memfit


class Meta(memfit.Workload):
    """A layer, and something that has no memory."""

    uses: str = "nothing"

    def model(self) -> nn.Module:
        if self.uses == "a kernel":
            nn.Embedding(4, 5, device="meta")(torch.zeros(2, dtype=torch.long, device="meta"))
        if self.uses == "fake tensors":
            with FakeTensorMode():
                nn.Conv2d(3, 4, 3)(torch.ones(1, 3, 8, 8))
        if self.uses == "a module":
            __import__("torch._refs")
        return nn.Linear(1024, 1024)

    def batch(self, m: int) -> torch.Tensor:
        return torch.ones(m, 1024, device=self.device)

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = model(batch).square().mean()
        return out
