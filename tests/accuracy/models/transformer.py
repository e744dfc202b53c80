"""A small language model written from its published parts, as a course asks its students to.

Token embedding, pre-norm blocks of RMSNorm, rotary attention and SwiGLU, a final norm and an
untied head; AdamW in Loshchilov and Hutter's order, out of place. The order of the operations,
and how long intermediate values live, follow the recorded traces: they decide the allocator's
sequence.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

_THETA = 10_000.0


class Linear(nn.Module):
    """A linear map without bias."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        deviation = math.sqrt(2 / (inputs + outputs))
        nn.init.trunc_normal_(self.weight, std=deviation, a=-3 * deviation, b=3 * deviation)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("...i,oi->...o", x, self.weight)


class Embedding(nn.Module):
    """A table of vectors."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, width))
        nn.init.trunc_normal_(self.weight, std=1.0, a=-3.0, b=3.0)

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        return self.weight[indices]


class RMSNorm(nn.Module):
    """Root mean square normalization, computed in fp32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kind = x.dtype
        x = x.to(torch.float32)
        scale = torch.sqrt(x.pow(2).mean(dim=-1, keepdim=True) + 1e-5)
        return (x / scale * self.weight).to(kind)


class SwiGLU(nn.Module):
    """The gated feed-forward network."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = Linear(width, hidden)
        self.down = Linear(hidden, width)
        self.up = Linear(width, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = self.gate(x)
        return self.down(gate * torch.sigmoid(gate) * self.up(x))


def rotate(x: torch.Tensor, table: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Turn neighbouring pairs of features by their position's angle; the tables are on the CPU."""
    length = x.shape[-2]
    cosine = table[0][:length].to(x.device)
    sine = table[1][:length].to(x.device)
    first = x[..., 0::2] * cosine - x[..., 1::2] * sine
    second = x[..., 0::2] * sine + x[..., 1::2] * cosine
    return torch.stack((first, second), dim=-1).flatten(-2)


def softmax(x: torch.Tensor) -> torch.Tensor:
    """Softmax over the last dimension, written out."""
    largest = torch.max(x, dim=-1, keepdim=True).values
    return torch.exp(x - largest) / torch.sum(torch.exp(x - largest), dim=-1, keepdim=True)


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """Attention with an explicit mask of ones and zeros."""
    scores = torch.einsum("...qd,...kd->...qk", query, key)
    scaled = scores / torch.sqrt(torch.tensor(query.shape[-1], device=query.device))
    scaled.masked_fill_(~mask.bool(), float("-inf"))
    weights = softmax(scaled)
    return torch.einsum("...qk,...kd->...qd", weights, value)


def plain_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Attention without a mask."""
    scores = torch.einsum("...qd,...kd->...qk", query, key) / math.sqrt(query.shape[-1])
    largest = torch.max(scores, dim=-1, keepdim=True).values
    exponentials = torch.exp(scores - largest)
    weights = exponentials / torch.sum(exponentials, dim=-1, keepdim=True)
    return torch.einsum("...qk,...kd->...qd", weights, value)


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = Linear(width, width)
        self.key = Linear(width, width)
        self.value = Linear(width, width)
        self.output = Linear(width, width)
        half = width // heads // 2
        angles = torch.outer(
            torch.arange(context, device="cpu").float(),
            _THETA ** (-torch.arange(half, device="cpu").float() / half),
        )
        self.table = (angles.cos(), angles.sin())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[-2]
        query, key, value = self.query(x), self.key(x), self.value(x)
        query, key, value = self._split(query), self._split(key), self._split(value)
        query = rotate(query, self.table)
        key = rotate(key, self.table)
        mask = torch.tril(torch.ones(length, length, device="cpu"))
        mixed = attend(query, key, value, mask.to(x.device))
        mixed = mixed.transpose(-2, -3).reshape(x.shape)
        return self.output(mixed)

    def _split(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(-2, -3)


class Block(nn.Module):
    """One pre-norm transformer block."""

    def __init__(self, width: int, heads: int, hidden: int, context: int) -> None:
        super().__init__()
        self.norm1 = RMSNorm(width)
        self.norm2 = RMSNorm(width)
        self.attention = Attention(width, heads, context)
        self.feed = SwiGLU(width, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Under autocast the names decide how long the fp32 values live.
        to_attend = self.norm1(x)
        attended = self.attention(to_attend)
        middle = x + attended
        to_feed = self.norm2(middle)
        fed = self.feed(to_feed)
        return middle + fed


class LanguageModel(nn.Module):
    """Token ids to logits."""

    def __init__(
        self, *, vocabulary: int, context: int, width: int, layers: int, heads: int, hidden: int
    ) -> None:
        super().__init__()
        self.embedding = Embedding(vocabulary, width)
        self.blocks = nn.ModuleList([Block(width, heads, hidden, context) for _ in range(layers)])
        self.norm = RMSNorm(width)
        self.head = Linear(width, vocabulary)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy, written out with a one-hot matrix."""
    largest = torch.max(logits, dim=-1, keepdim=True).values
    logarithms = (logits - largest) - torch.log(
        torch.sum(torch.exp(logits - largest), dim=-1, keepdim=True)
    )
    chosen = torch.zeros_like(logarithms)
    chosen.scatter_(1, targets.unsqueeze(1), 1.0)
    return -torch.sum(chosen * logarithms) / logits.shape[0]


class Adam(torch.optim.Optimizer):
    """AdamW out of place, with its state made at construction."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(
            parameters, {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "decay": 0.01}
        )
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = {
                    "m": torch.zeros_like(parameter.data),
                    "v": torch.zeros_like(parameter.data),
                    "t": 1,
                }

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            first, second = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                gradient = parameter.grad.data
                state = self.state[parameter]
                t = state["t"]
                old_m = state["m"]
                m = first * old_m + (1 - first) * gradient
                old_v = state["v"]
                v = second * old_v + (1 - second) * gradient**2
                rate = group["lr"] * math.sqrt(1 - second**t) / (1 - first**t)
                parameter.data = parameter.data - rate * (m / (torch.sqrt(v) + group["eps"]))
                parameter.data = parameter.data - group["lr"] * group["decay"] * parameter.data
                state["m"], state["v"], state["t"] = m, v, t + 1
