"""A workload with many faces: what `tests.benchmarks.draws` draws is built here."""

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - its usual name
from torch.utils.checkpoint import checkpoint

import memfit


class Attention(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, dropout: float, *, causal: bool) -> None:
        super().__init__()
        self.heads = max(1, width // 64)
        self.causal = causal
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.project = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        m, length, width = x.shape
        shape = (m, length, 3, self.heads, width // self.heads)
        q, k, v = self.project(self.norms[0](x)).view(shape).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + F.dropout(self.out(mixed.transpose(1, 2).reshape(m, length, width)), self.dropout)
        return x + F.dropout(self.down(F.gelu(self.up(self.norms[1](x)))), self.dropout)


def dense(width: int, dropout: float) -> nn.Module:
    return nn.Sequential(
        nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU(), nn.Dropout(dropout)
    )


def convolution(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
    )


class Recurrent(nn.Module):
    """One recurrent layer, without its state."""

    def __init__(self, width: int, *, gated: bool) -> None:
        super().__init__()
        self.layer = (nn.LSTM if gated else nn.GRU)(width, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.layer(x)[0]
        return hidden


class Net(nn.Module):
    """An entry, blocks and a head."""

    def __init__(self, w: "Drawn") -> None:
        super().__init__()
        self.checkpointed = w.checkpointed
        self.kind = w.kind
        self.classes = w.classes
        if w.kind == "cnn":
            self.entry: nn.Module = nn.Conv2d(3, w.width, 3, padding=1)
        elif w.kind == "mlp":
            self.entry = nn.Linear(w.width, w.width)
        else:
            self.entry = nn.Embedding(w.classes, w.width)
        blocks: dict[str, Any] = {
            "mlp": lambda: dense(w.width, w.dropout),
            "transformer": lambda: Attention(w.width, w.dropout, causal=w.even),
            "cnn": lambda: convolution(w.width),
            "rnn": lambda: Recurrent(w.width, gated=w.even),
        }
        self.blocks = nn.ModuleList(blocks[w.kind]() for _ in range(w.depth))
        self.head = nn.Linear(w.width, w.classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for index, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
            if self.kind == "cnn" and index % 3 == 2 and x.shape[-1] > 4:
                x = F.max_pool2d(x, 2)
        if self.kind == "cnn":
            x = x.mean((2, 3))
        logits: Tensor = self.head(x)
        return logits


class Drawn(memfit.Workload):
    """One drawn workload."""

    kind: Literal["mlp", "transformer", "cnn", "rnn"] = "mlp"
    depth: int = 4
    width: int = 256
    length: int = 64
    """Positions of a sequence, or the side of an image."""
    classes: int = 1000
    dropout: float = 0.0
    even: bool = True
    """Causal attention and LSTM, or full attention and GRU."""
    checkpointed: bool = False
    half_weights: bool = False
    """Weights in bfloat16."""
    update: str = "adamw"

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.half_weights else torch.float32

    def model(self) -> nn.Module:
        return Net(self).to(self.dtype)

    def batch(self, m: int) -> tuple[Tensor, Tensor]:
        def integers(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.long, device=self.device)

        if self.kind == "cnn":
            shape: tuple[int, ...] = (m, 3, self.length, self.length)
            return torch.ones(shape, dtype=self.dtype, device=self.device), integers(m)
        if self.kind == "mlp":
            shape = (m, self.length, self.width)
            inputs = torch.ones(shape, dtype=self.dtype, device=self.device)
            return inputs, integers(m, self.length)
        return integers(m, self.length), integers(m, self.length)

    def loss(self, model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, targets = batch
        return F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        parameters = list(model.parameters())
        name, _, form = self.update.partition(" ")
        forms: dict[str, Any] = {
            "": {}, "loop": {"foreach": False}, "foreach": {"foreach": True},
            "fused": {"fused": True}, "capturable": {"capturable": True},
        }  # fmt: skip
        makers: dict[str, Any] = {
            "sgd": lambda **how: torch.optim.SGD(parameters, lr=1e-3, **how),
            "momentum": lambda **how: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9, **how),
            "adam": lambda **how: torch.optim.Adam(parameters, **how),
            "adamw": lambda **how: torch.optim.AdamW(parameters, **how),
            "amsgrad": lambda **how: torch.optim.AdamW(parameters, amsgrad=True, **how),
            "adafactor": lambda **how: torch.optim.Adafactor(parameters, **how),
            "rmsprop": lambda **how: torch.optim.RMSprop(parameters, **how),
            "nadam": lambda **how: torch.optim.NAdam(parameters, **how),
            "adagrad": lambda **how: torch.optim.Adagrad(parameters, **how),
        }
        made: torch.optim.Optimizer = makers[name](**forms[form])
        return made
