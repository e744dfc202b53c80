"""An embedding with sparse gradients; which rows have one is known where the tokens are."""

import torch
from torch import nn

import memfit


class Sparse(memfit.Workload):
    rows: int = 50_000
    width: int = 64
    tokens: int = 4096

    def model(self):
        return nn.Embedding(self.rows, self.width, sparse=True)

    def optimizer(self, model):
        return torch.optim.SparseAdam(model.parameters())

    def batch(self, m):
        return torch.randint(100, (m, self.tokens), device=self.device)

    def loss(self, model, batch):
        return model(batch).square().mean()
