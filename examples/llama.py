"""A Llama-shaped language model of 7B parameters in plain torch, as a memfit workload.

    memfit probe examples/llama.py --device h100-80gb --logical-batch 512

The shape is the one of Touvron et al. (2023), "Llama 2: Open Foundation and Fine-Tuned Chat
Models": RMS norms before each half of a block, rotary positions, SwiGLU, untied embeddings. The
parameters are bfloat16, and so are the gradients and AdamW's two moments; every block is
checkpointed. 70B is `--set width=8192 --set layers=80 --set heads=64 --set groups=8 --set
hidden=28672`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import memfit


def rotary(tokens: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines of rotary positions, each (tokens, width)."""
    frequencies = 10000.0 ** (-torch.arange(0, width, 2, device=device).float() / width)
    angles = torch.arange(tokens, device=device).float()[:, None] * frequencies
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(torch.bfloat16), angles.sin().to(torch.bfloat16)


def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Turn each pair of channels by its position's angle."""
    first, second = x.chunk(2, dim=-1)
    return x * cosines + torch.cat((-second, first), dim=-1) * sines


class Block(nn.Module):
    """Causal attention with rotary positions and grouped keys, then SwiGLU."""

    def __init__(self, width: int, heads: int, groups: int, hidden: int) -> None:
        super().__init__()
        self.heads, self.groups, self.each = heads, groups, width // heads
        bf16 = torch.bfloat16
        self.norm1 = nn.RMSNorm(width, eps=1e-5, dtype=bf16)
        self.q = nn.Linear(width, width, bias=False, dtype=bf16)
        self.k = nn.Linear(width, groups * self.each, bias=False, dtype=bf16)
        self.v = nn.Linear(width, groups * self.each, bias=False, dtype=bf16)
        self.out = nn.Linear(width, width, bias=False, dtype=bf16)
        self.norm2 = nn.RMSNorm(width, eps=1e-5, dtype=bf16)
        self.gate = nn.Linear(width, hidden, bias=False, dtype=bf16)
        self.up = nn.Linear(width, hidden, bias=False, dtype=bf16)
        self.down = nn.Linear(hidden, width, bias=False, dtype=bf16)

    def forward(self, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        y = self.norm1(x)
        q = self.q(y).view(batch, tokens, self.heads, self.each).transpose(1, 2)
        k = self.k(y).view(batch, tokens, self.groups, self.each).transpose(1, 2)
        v = self.v(y).view(batch, tokens, self.groups, self.each).transpose(1, 2)
        q, k = rotate(q, cosines, sines), rotate(k, cosines, sines)
        if self.groups < self.heads:
            k, v = (t.repeat_interleave(self.heads // self.groups, dim=1) for t in (k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, tokens, width))
        y = self.norm2(x)
        result: Tensor = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return result


class Transformer(nn.Module):
    """Token ids (batch, tokens) to logits over the vocabulary."""

    def __init__(
        self, vocabulary: int, width: int, heads: int, groups: int, hidden: int, layers: int
    ) -> None:
        super().__init__()
        self.each = width // heads
        self.token = nn.Embedding(vocabulary, width, dtype=torch.bfloat16)
        self.blocks = nn.ModuleList(Block(width, heads, groups, hidden) for _ in range(layers))
        self.norm = nn.RMSNorm(width, eps=1e-5, dtype=torch.bfloat16)
        self.head = nn.Linear(width, vocabulary, bias=False, dtype=torch.bfloat16)

    def forward(self, ids: Tensor) -> Tensor:
        cosines, sines = rotary(ids.shape[1], self.each, ids.device)
        x = self.token(ids)
        for block in self.blocks:
            x = checkpoint(block, x, cosines, sines, use_reentrant=False)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Llama(memfit.Workload):
    """Llama 7B in bfloat16 with activation checkpointing, on sequences of `seq_len` tokens."""

    seq_len: int = 2048
    vocabulary: int = 32000
    width: int = 4096
    heads: int = 32
    groups: int = 32
    hidden: int = 11008
    layers: int = 32

    verify_with = {
        "seq_len": 64,
        "vocabulary": 1000,
        "width": 256,
        "heads": 4,
        "groups": 4,
        "hidden": 688,
        "layers": 2,
    }

    def model(self) -> nn.Module:
        return Transformer(
            self.vocabulary, self.width, self.heads, self.groups, self.hidden, self.layers
        )

    def batch(self, m: int) -> Tensor:
        # One token more than the model reads: inputs and targets are shifted by one.
        return torch.randint(self.vocabulary, (m, self.seq_len + 1), device=self.device)

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        logits = model(batch[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    def count(self, batch: Tensor) -> int:
        # The loss is a mean over predicted tokens, so tokens are what a group is weighted by.
        return batch.shape[0] * self.seq_len
