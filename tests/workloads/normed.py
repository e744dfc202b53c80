"""Layers with a batch normalisation, which needs at least two examples while it trains."""

import torch
from torch import nn

import memfit


class Normed(memfit.Workload):
    width: int = 512
    depth: int = 4

    def model(self):
        layers = []
        for _ in range(self.depth):
            layers += [nn.Linear(self.width, self.width), nn.BatchNorm1d(self.width), nn.GELU()]
        return nn.Sequential(*layers)

    def batch(self, m):
        return torch.ones(m, self.width, device=self.device) * torch.arange(
            1.0, m + 1, device=self.device
        ).unsqueeze(1)

    def loss(self, model, batch):
        return model(batch).square().mean()
