"""GPT-2 (124M parameters) in plain torch, as a memfit workload.

    memfit probe examples/gpt2.py --device rtx-4090 --precision bf16 --logical-batch 480

The model is the one of Radford et al. (2019), "Language Models are Unsupervised Multitask
Learners": learned positions, pre-norm blocks, tied input and output embeddings.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import memfit


class Block(nn.Module):
    """One transformer block: causal self-attention, then a feed-forward network."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = nn.Dropout(dropout)
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        heads = (batch, tokens, self.heads, width // self.heads)
        q, k, v = (t.view(heads).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        drop = self.dropout.p if self.training else 0.0
        attended = F.scaled_dot_product_attention(q, k, v, dropout_p=drop, is_causal=True)
        x = x + self.dropout(self.out(attended.transpose(1, 2).reshape(batch, tokens, width)))
        hidden = F.gelu(self.up(self.norm2(x)), approximate="tanh")
        result: Tensor = x + self.dropout(self.down(hidden))
        return result


class Transformer(nn.Module):
    """A decoder-only language model: token ids (batch, tokens) to logits over the vocabulary."""

    def __init__(
        self, vocabulary: int, tokens: int, width: int, heads: int, layers: int, dropout: float
    ) -> None:
        super().__init__()
        self.checkpointing = False  # recompute every block in backward
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(tokens, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.token.weight  # tied: one matrix reads tokens and writes them

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device)
        x = self.dropout(self.token(ids) + self.position(positions))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointing else block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class GPT2(memfit.Workload):
    """GPT-2 124M on sequences of `seq_len` tokens."""

    seq_len: int = 1024
    vocabulary: int = 50257
    width: int = 768
    heads: int = 12
    layers: int = 12
    dropout: float = 0.1
    checkpointing: bool = False

    verify_with = {"seq_len": 64, "layers": 2, "width": 192, "vocabulary": 1000}

    def model(self) -> nn.Module:
        model = Transformer(
            self.vocabulary, self.seq_len, self.width, self.heads, self.layers, self.dropout
        )
        model.checkpointing = self.checkpointing
        return model

    def batch(self, m: int) -> Tensor:
        # One token more than the model reads: inputs and targets are shifted by one.
        return torch.randint(self.vocabulary, (m, self.seq_len + 1), device=self.device)

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        logits = model(batch[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1)

    def count(self, batch: Tensor) -> int:
        # The loss is a mean over predicted tokens, so tokens are what a group is weighted by.
        return batch.shape[0] * self.seq_len
