"""How a step is taken: precision, what is kept for backward, attention, compilation, graphs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.compatibility.catalogue import Absent, item
from tests.compatibility.training import CARD, integers, random, train

PRECISION, KEPT, ATTENTION, GRAPHS = "Precision", "Kept for backward", "Attention", "CUDA graphs"


def _mlp(width: int = 256, layers: int = 3) -> nn.Sequential:
    parts = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers)]
    return nn.Sequential(*parts).to(CARD)


@item(PRECISION, "fp16 autocast with GradScaler")
def scaler() -> str:
    """Scale, unscale, clip, step, update; the scale is read back."""
    model, scaler = _mlp(), torch.amp.GradScaler("cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        with torch.autocast("cuda", torch.float16):
            loss = model(random(32, 256)).square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert len(optimizer.state) == 6
    assert scaler.get_scale() == 65536, scaler.get_scale()
    return "scale 65,536, every optimizer step applied"


@item(PRECISION, "bf16 autocast and bf16 weights")
def bf16() -> None:
    """Autocast over fp32 weights, then weights and states in bf16, clipped."""
    model = _mlp()
    train(model, lambda: model(random(32, 256)).square().mean(), autocast=torch.bfloat16)
    model = model.bfloat16()
    x = random(32, 256, dtype=torch.bfloat16)
    train(model, lambda: model(x).square().mean())


@item(PRECISION, "int8 matmul")
def int8() -> None:
    """torch._int_mm."""
    a = torch.ones(64, 128, device=CARD, dtype=torch.int8)
    assert torch._int_mm(a, torch.ones(128, 256, device=CARD, dtype=torch.int8)).shape == (64, 256)


@item(PRECISION, "fp8 matmul")
def fp8() -> None:
    """torch._scaled_mm in float8_e4m3fn, scales per tensor and per row."""
    a = random(64, 128).to(torch.float8_e4m3fn)
    b = random(256, 128).to(torch.float8_e4m3fn).t()
    one = torch.ones((), device=CARD)
    torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    rows, columns = torch.ones(64, 1, device=CARD), torch.ones(1, 256, device=CARD)
    torch._scaled_mm(a, b, scale_a=rows, scale_b=columns, out_dtype=torch.bfloat16)


@item(PRECISION, "grouped matmul")
def grouped() -> str:
    """torch.nn.functional.grouped_mm or torch._grouped_mm, forward and backward, bf16."""
    multiply = getattr(F, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
    if multiply is None:
        raise Absent("no grouped_mm in this torch")
    a = random(64, 128, dtype=torch.bfloat16, requires_grad=True)
    b = random(4, 128, 256, dtype=torch.bfloat16, requires_grad=True)
    ends = torch.tensor([16, 32, 48, 64], device=CARD, dtype=torch.int32)
    multiply(a, b, offs=ends).square().sum().backward()
    assert a.grad is not None
    return str(multiply.__name__)


@item(KEPT, "activation checkpointing")
def checkpointing() -> None:
    """checkpoint() with and without re-entrance, checkpoint_sequential, random state kept."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.Dropout(0.1)) for _ in range(4)))
    model.to(CARD)
    x = random(64, 256, requires_grad=True)

    def each(*, again: bool) -> torch.Tensor:
        h = x
        for layer in model:
            h = checkpoint(layer, h, use_reentrant=again)
        return h.square().mean()

    train(model, lambda: each(again=False))
    train(model, lambda: each(again=True))
    train(model, lambda: checkpoint_sequential(model, 2, x, use_reentrant=False).square().mean())


@item(KEPT, "selective checkpointing")
def selective() -> None:
    """create_selective_checkpoint_contexts keeps the products of matrices."""
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    model = _mlp()

    def policy(_context: object, operator: object, *_: object, **__: object) -> CheckpointPolicy:
        keep = operator in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    def loss() -> torch.Tensor:
        contexts = lambda: create_selective_checkpoint_contexts(policy)  # noqa: E731
        seen = checkpoint(model, random(64, 256), use_reentrant=False, context_fn=contexts)
        return seen.square().mean()

    train(model, loss)


@item(KEPT, "save_on_cpu")
def offload() -> None:
    """torch.autograd.graph.save_on_cpu, pageable and pinned."""
    for pinned in (False, True):
        model = _mlp()

        def loss(model: nn.Module = model, *, pinned: bool = pinned) -> torch.Tensor:
            with torch.autograd.graph.save_on_cpu(pin_memory=pinned):
                return model(random(512, 256)).square().mean()

        train(model, loss)


def _attention(backend: SDPBackend) -> None:
    q, k, v = (random(2, 8, 256, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    with sdpa_kernel(backend):
        for causal in (True, False):
            F.scaled_dot_product_attention(q, k, v, is_causal=causal).sum().backward()
    assert q.grad is not None


@item(ATTENTION, "SDPA flash")
def flash() -> None:
    """Forward and backward in bf16, causal and not, dropout."""
    _attention(SDPBackend.FLASH_ATTENTION)
    q = random(2, 8, 256, 64, dtype=torch.half, requires_grad=True)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        F.scaled_dot_product_attention(q, q, q, dropout_p=0.1).sum().backward()


@item(ATTENTION, "SDPA efficient")
def efficient() -> None:
    """Forward and backward in bf16, causal and with a mask."""
    _attention(SDPBackend.EFFICIENT_ATTENTION)
    q = random(2, 8, 256, 64, requires_grad=True)
    mask = random(2, 8, 256, 256)
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        F.scaled_dot_product_attention(q, q, q, attn_mask=mask).sum().backward()


@item(ATTENTION, "SDPA cuDNN")
def cudnn_attention() -> None:
    """Forward and backward in bf16, causal and not."""
    _attention(SDPBackend.CUDNN_ATTENTION)


@item(ATTENTION, "SDPA math")
def math() -> None:
    """Forward and backward in bf16; grouped queries."""
    _attention(SDPBackend.MATH)
    q = random(2, 8, 64, 32, requires_grad=True)
    k = random(2, 2, 64, 32, requires_grad=True)
    F.scaled_dot_product_attention(q, k, k, enable_gqa=True).sum().backward()


@item(ATTENTION, "flex attention, not compiled")
def flex() -> None:
    """flex_attention with a score function, forward and backward."""
    from torch.nn.attention.flex_attention import flex_attention

    q = random(1, 2, 128, 64, requires_grad=True)
    warnings.simplefilter("ignore")
    out = flex_attention(q, q, q, score_mod=lambda s, b, h, i, j: s + (i - j))
    out.sum().backward()
    assert q.grad is not None


@item(ATTENTION, "nested tensors (jagged)")
def jagged() -> None:
    """Jagged sequences through a linear layer and attention, forward and backward."""
    layer = nn.Linear(64, 64, device=CARD)
    parts = [random(n, 64) for n in (10, 20, 30)]
    x = torch.nested.nested_tensor(parts, layout=torch.jagged, device=CARD)

    def loss() -> torch.Tensor:
        h = layer(x).unflatten(-1, (4, 16)).transpose(1, 2).bfloat16()
        return F.scaled_dot_product_attention(h, h, h).transpose(1, 2).values().float().mean()

    train(layer, loss)


def _warm(run: Callable[[], None]) -> None:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)


@item(GRAPHS, "whole step captured")
def captured() -> None:
    """Forward, backward and a capturable AdamW step in one torch.cuda.graph; 3 replays."""
    model = _mlp()
    optimizer = torch.optim.AdamW(model.parameters(), capturable=True)
    x = random(32, 256)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        model(x).square().mean().backward()
        optimizer.step()

    _warm(step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(3):
        x.copy_(random(32, 256))
        graph.replay()
    assert len(optimizer.state) == 6


@item(GRAPHS, "make_graphed_callables")
def callables() -> None:
    """A model whose forward and backward are graphs, trained by an ordinary loop."""
    model = _mlp()
    whole: Any = torch.cuda.make_graphed_callables(model, (random(32, 256),))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for _ in range(2):
        F.cross_entropy(whole(random(32, 256)), integers(256, 32)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len(optimizer.state) == 6
