"""A small model whose loss reads from the device what the file named by READS says."""

import os
from pathlib import Path

import torch
from torch import nn

import memfit


class Reads(memfit.Workload):
    width: int = 256

    def model(self):
        return nn.Sequential(nn.Linear(self.width, self.width), nn.GELU(), nn.Linear(self.width, 8))

    def batch(self, m):
        return torch.ones(m, 64, self.width, device=self.device)

    def loss(self, model, batch):
        out = model(batch)
        kind = Path(os.environ["READS"]).read_text()
        return getattr(self, f"with_{kind}")(out)

    def with_nothing(self, out):
        return out.square().mean()

    def with_logged(self, out):
        loss = out.square().mean()
        print(loss.item())
        return loss

    def with_branch(self, out):
        if out.sum() > 0:
            out = out + torch.zeros(64 * 2**20, device=self.device).sum()
        return out.square().mean()

    def with_counter(self, out):
        counter = torch.zeros((), dtype=torch.long, device=self.device)
        kept = []
        while counter.item() < 5:
            counter += 1
            kept.append(out.repeat(1, 1, 64) + counter)
        return torch.stack(kept).square().mean()

    def with_mask(self, out):
        wide = out.repeat(1, 1, 256)
        return wide[wide[..., 0] > 0.5].square().mean()

    def with_labels(self, out):
        labels = torch.arange(out[..., 0].numel(), device=self.device) % 4
        labels = torch.where(labels == 0, -100, labels)
        flat = out.flatten(0, 1)[labels != -100]
        return nn.functional.cross_entropy(flat, labels[labels != -100])

    def with_experts(self, out):
        tokens = out.flatten(0, 1)
        weights, chosen = tokens[:, :4].softmax(-1).topk(2)
        mixed = torch.zeros_like(tokens)
        for expert in range(4):
            rows, slot = torch.where(chosen == expert)
            part = tokens[rows].repeat(1, 64).tanh().view(len(rows), 64, 8).mean(1)
            mixed.index_add_(0, rows, part * weights[rows, slot, None])
        return mixed.square().mean()

    def with_endless(self, out):
        while not bool((out.sum() > 2).any()):
            pass
        return out.square().mean()
