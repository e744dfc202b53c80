"""A stack of linear layers, wide enough for memory to show."""

import torch
from torch import nn

import memfit


class Stack(memfit.Workload):
    width: int = 512
    depth: int = 4

    def model(self):
        layers = []
        for _ in range(self.depth):
            layers += [nn.Linear(self.width, self.width), nn.GELU()]
        return nn.Sequential(*layers)

    def batch(self, m):
        return torch.ones(m, 16, self.width, device=self.device)

    def loss(self, model, batch):
        return model(batch).square().mean()
