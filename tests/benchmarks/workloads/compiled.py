"""A workload under torch.compile."""

import torch
from torch import Tensor, nn

import memfit


class Compiled(memfit.Workload):
    """A small stack, compiled as a whole."""

    width: int = 1024
    length: int = 16384

    def model(self) -> nn.Module:
        net = nn.Sequential(
            nn.LayerNorm(self.width),
            nn.Linear(self.width, 4 * self.width),
            nn.GELU(),
            nn.Linear(4 * self.width, self.width),
        )
        net.compile()
        return net

    def batch(self, m: int) -> Tensor:
        return torch.ones(m, self.length, self.width, device=self.device)

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        value: Tensor = model(batch).square().mean()
        return value
