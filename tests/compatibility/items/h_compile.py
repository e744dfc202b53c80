"""torch.compile with Inductor and Triton; the slowest items come last."""

from __future__ import annotations

import torch
from torch import nn

from tests.compatibility.catalogue import SLOW_S, item
from tests.compatibility.training import CARD, random, train

COMPILE = "torch.compile"
ALONE = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}


@item(COMPILE, "default mode", timeout_s=SLOW_S, env=ALONE)
def compiled() -> None:
    """A small model, forward and backward, compiled by Inductor and Triton."""
    model = nn.Sequential(nn.Linear(128, 128), nn.GELU(), nn.LayerNorm(128)).to(CARD)
    fast = torch.compile(model)
    train(model, lambda: fast(random(32, 128)).square().mean())


@item(COMPILE, "reduce-overhead", timeout_s=SLOW_S, env=ALONE)
def reduced() -> None:
    """The same with CUDA graph trees."""
    model = nn.Sequential(nn.Linear(128, 128), nn.GELU(), nn.LayerNorm(128)).to(CARD)
    fast = torch.compile(model, mode="reduce-overhead")
    x = random(32, 128)

    def loss() -> torch.Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        return fast(x).square().mean()

    train(model, loss, steps=4)


@item(COMPILE, "optimizer step", timeout_s=SLOW_S, env=ALONE)
def compiled_step() -> None:
    """AdamW's step compiled into one graph."""
    model = nn.Sequential(nn.Linear(64, 64)).to(CARD)
    optimizer = torch.optim.AdamW(model.parameters())
    step = torch.compile(optimizer.step, fullgraph=False)
    for _ in range(2):
        model(random(8, 64)).square().mean().backward()
        step()
        optimizer.zero_grad()
    assert len(optimizer.state) == 2


@item(COMPILE, "flex attention", timeout_s=SLOW_S, env=ALONE)
def compiled_flex() -> None:
    """Compiled flex_attention with a causal block mask, forward and backward."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 256, 256, device="cuda")
    q = random(1, 2, 256, 64, dtype=torch.bfloat16, requires_grad=True)
    torch.compile(flex_attention)(q, q, q, block_mask=mask).sum().backward()
    assert q.grad is not None
