"""Single operators: the peak of one call of ten, with the gradients of earlier calls kept.

Each operator is written from its definition, in the order of operations that the benchmark's
scripts follow. Where neither settles a choice (an fp32 copy, the order of a sum), the choice is the
one that the smallest row of the operator agrees with, and the other rows test it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from tests.accuracy.models import losses
from tests.accuracy.models.bench import Bench, Config, dtype_of, median_peak, random

ALWAYS_FULL = frozenset({"group_norm"})
"""Operators whose rows are alike in every mode: all of them ran forward and backward."""
_MASKED = -1e9
"""The score of a position that may not be seen."""


def measure(*, operator: str, config: Config, mode: str) -> dict[str, Any]:
    """Return the median peak of ten calls."""
    return {"peak_allocated_bytes": _median_peak(OPERATORS[operator](config), operator, mode)}


def _median_peak(bench: Bench, operator: str, mode: str) -> int:
    if mode == "forward" and operator not in ALWAYS_FULL:
        # Rows of one process share what cuBLAS keeps: earlier rows ran backward as well.
        bench.backward(bench.forward(), bench.gradient())
        _forget_gradients(bench)
        call = bench.forward
    else:
        gradient = bench.gradient()
        output = bench.forward() if mode == "backward" else None

        def call() -> None:
            bench.backward(bench.forward() if output is None else output, gradient)

    return median_peak(call)


def _forget_gradients(bench: Bench) -> None:
    for thing in bench.kept:
        for tensor in thing.parameters() if isinstance(thing, nn.Module) else (thing,):
            tensor.grad = None


def cross_entropy(config: Config) -> Bench:
    rows, vocabulary = config["B"] * config["T"], config["V"]
    logits = torch.randn(rows, vocabulary, device="cuda", requires_grad=True)
    targets = torch.randint(vocabulary, (rows, 1), device="cuda").squeeze(1)
    return Bench(lambda: F.cross_entropy(logits, targets), retain=False)


class Gated(nn.Module):
    """A gated feed-forward layer without biases."""

    def __init__(self, width: int, hidden: int, activation: Callable[[Any], Any]) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)
        self.activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down(self.activation(self.gate(x)) * self.up(x))
        return result


def _gated(config: Config, batch: int, activation: Callable[[Any], Any]) -> Bench:
    x = random(batch, config["T"], config["hidden_size"], config=config, gradient=True)
    with torch.device("meta"):
        layer = Gated(config["hidden_size"], config["intermediate_size"], activation)
    layer = layer.to_empty(device="cuda").to(dtype_of(config))
    return Bench(lambda: layer(x), lambda: torch.randn_like(x), kept=(layer, x))


def geglu(config: Config) -> Bench:
    return _gated(config, config["bsz"], lambda x: F.gelu(x, approximate="tanh"))


def swiglu(config: Config) -> Bench:
    return _gated(config, config["B"], F.silu)


def _rotate_half(x: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    return torch.cat((-second, first), dim=-1)


def rope(config: Config) -> Bench:
    length: int = config["T"] if "T" in config else config["seq_len"]
    heads, key_heads = config["num_q_heads"], config["num_kv_heads"]
    width = (config["H"] if "H" in config else config["hidden_size"]) // heads
    query = random(1, length, heads, width, config=config, gradient=True).transpose(1, 2)
    key = random(1, length, key_heads, width, config=config, gradient=True).transpose(1, 2)
    gradients = (torch.randn_like(query), torch.randn_like(key))
    positions = torch.arange(length, device="cuda").unsqueeze(0)
    rates = 1.0 / 10_000 ** (torch.arange(0, width, 2, device="cuda").float() / width)
    with torch.no_grad():
        angles = (rates[None, :, None] @ positions[:, None, :].float()).transpose(1, 2)
        both = torch.cat((angles, angles), dim=-1)
        cosine, sine = both.cos().to(query.dtype), both.sin().to(query.dtype)
    del angles, both

    def forward() -> tuple[torch.Tensor, torch.Tensor]:
        wide_cosine, wide_sine = cosine.unsqueeze(1), sine.unsqueeze(1)
        return (
            (query * wide_cosine) + (_rotate_half(query) * wide_sine),
            (key * wide_cosine) + (_rotate_half(key) * wide_sine),
        )

    return Bench(forward, lambda: gradients, (query, key), kept=(positions, rates))


def jsd(config: Config) -> Bench:
    """The generalized Jensen-Shannon divergence at one half, from logarithms."""
    if "BT" in config:
        rows, vocabulary = config["BT"], config["vocab_size"]
    else:
        rows, vocabulary = config["B"] * config["T"], config["V"]
    student = torch.randn(rows, vocabulary, requires_grad=True, device="cuda").log_softmax(-1)
    teacher = torch.randn(rows, vocabulary, device="cuda").log_softmax(-1)

    def forward() -> torch.Tensor:
        middle = torch.lerp(torch.exp(student), torch.exp(teacher), 0.5)
        loss = 0.5 * F.kl_div(torch.log(middle), teacher, reduction="none", log_target=True).sum(
            -1
        ) + 0.5 * F.kl_div(torch.log(middle), student, reduction="none", log_target=True).sum(-1)
        return loss.mean()

    return Bench(forward)


def sparsemax(config: Config) -> Bench:
    """Martins and Astudillo's projection onto the simplex, by sorting."""
    x = random(config["B"] * config["T"], config["V"], config=config, gradient=True)
    return Bench(lambda: project(x), lambda: torch.randn_like(x))


def project(x: torch.Tensor) -> torch.Tensor:
    """Project the last dimension onto the simplex; the threshold is a constant to autograd."""
    with torch.no_grad():
        ordered, places = torch.sort(x, dim=-1, descending=True)
        sums = ordered.cumsum(-1)
        ranks = torch.arange(1, x.size(-1) + 1, device=x.device, dtype=x.dtype)
        bounds = 1 + ranks * ordered
        supported = bounds > sums
        support = supported.sum(-1, keepdim=True)
        total = sums.gather(-1, support - 1)
        threshold = (total - 1) / support.to(x.dtype)
    assert places.shape == x.shape
    return torch.clamp(x - threshold, min=0)


def project_masked(x: torch.Tensor) -> torch.Tensor:
    """Project the last dimension onto the simplex; rows without support get zeros."""
    ordered = torch.sort(x, dim=-1, descending=True)[0]
    sums = ordered.cumsum(-1)
    ranks = torch.arange(1, x.size(-1) + 1, device=x.device, dtype=x.dtype)
    supported = (1 + ranks * ordered > sums) & (ordered > _MASKED / 10)
    support = supported.sum(-1, keepdim=True)
    least_one = torch.max(support, torch.ones_like(support))
    threshold = (sums.gather(-1, least_one - 1) - 1) / least_one.to(x.dtype)
    threshold = torch.where(support == 0, torch.full_like(threshold, float("inf")), threshold)
    return torch.clamp(x - threshold, min=0)


class _Mixer(nn.Module):
    """Weight and bias of a convolution over scores."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        size, groups = config["K"], config["groups"]
        shape = (config["C_out"], config["C_in"] // groups, size, size)
        kind = dtype_of(config)
        self.weight = nn.Parameter(torch.empty(shape, device="cuda", dtype=kind))
        self.bias = nn.Parameter(torch.empty(config["C_out"], device="cuda", dtype=kind))


def _token_attention(config: Config, normalize: Callable[[torch.Tensor], torch.Tensor]) -> Bench:
    """Causal scores, normalized, mixed over neighbouring keys and queries by a convolution."""
    length = config["L"]
    other, mixer = _Mixer(config), _Mixer(config)
    shape = (config["B"], config["C_in"], length, length)
    scores = random(*shape, config=config)
    gradient = torch.randn_like(scores)
    scores.requires_grad_()

    def forward() -> torch.Tensor:
        mask = torch.tril(torch.ones(length, length, dtype=torch.bool, device="cuda")).view(
            1, 1, length, length
        )
        lowest = torch.tensor(_MASKED, device="cuda", dtype=scores.dtype)
        zero = torch.tensor(0.0, device="cuda", dtype=scores.dtype)
        weights = normalize(scores.masked_fill(~mask, lowest))
        mixed = F.conv2d(
            weights,
            mixer.weight,
            mixer.bias,
            padding=config["K"] // 2,
            groups=config["groups"],
        )
        return mixed.masked_fill(~mask, zero)

    return Bench(forward, lambda: gradient, kept=(other,))


def multi_token_attention(config: Config) -> Bench:
    return _token_attention(config, lambda x: F.softmax(x, dim=-1))


def sparse_multi_token_attention(config: Config) -> Bench:
    return _token_attention(config, project_masked)


class NeighborhoodAttention(nn.Module):
    """Attention of each position to its neighbourhood, by a mask over all scores.

    Which positions are near is a matter of values, and changes no size: the mask stays empty.
    """

    def __init__(self, width: int, heads: int, size: int, dilation: int) -> None:
        super().__init__()
        self.heads = heads
        self.size = size
        self.dilation = dilation
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.output = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        query, key, value = (
            part(x).view(batch, length, self.heads, -1).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        scores = torch.matmul(query, key.transpose(-2, -1)) * (width // self.heads) ** -0.5
        near = torch.zeros(length, length, device=x.device, dtype=torch.bool)
        weights = F.softmax(scores.masked_fill(~near, float("-inf")), dim=-1)
        mixed = torch.matmul(weights, value)
        mixed = mixed.transpose(1, 2).reshape(batch, length, width)
        result: torch.Tensor = self.output(mixed)
        return result


def fused_neighborhood_attention(config: Config) -> Bench:
    # Two layers with equal weights are built, for two implementations; one of them is measured.
    other, layer = (
        NeighborhoodAttention(
            config["hidden_size"], config["num_heads"], config["kernel_size"], config["dilation"]
        ).to("cuda")
        for _ in range(2)
    )
    shape = (config["batch_size"], config["seq_len"], config["hidden_size"])
    x = random(*shape, config=config, gradient=True)
    return Bench(lambda: layer(x), lambda: torch.randn_like(x), kept=(other,))


def group_norm(config: Config) -> Bench:
    channels = config["C"]
    x = random(config["M"], channels, config["H"], config=config, gradient=True)
    # As above: two implementations are built, with a set of parameters each.
    other, norm = (
        nn.GroupNorm(channels // config["channels_per_group"], channels, eps=config["eps"]).to(
            "cuda"
        )
        for _ in range(2)
    )
    return Bench(lambda: norm(x), lambda: torch.randn_like(x), kept=(other,))


def relu_squared(config: Config) -> Bench:
    x = random(config["N"], config=config, gradient=True)
    return Bench(lambda: F.relu(x) ** 2, lambda: torch.randn_like(x))


def megatron_rms_norm(config: Config) -> Bench:
    shape = (config["S"], config["B"], config["H"])
    x = torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    norm = nn.RMSNorm(config["H"], device="cuda", dtype=torch.bfloat16)
    # A gradient for the output is made beside it, and the sum is what backward starts from.
    return Bench(lambda: norm(x).sum(), kept=(torch.randn_like(x),))


OPERATORS: dict[str, Callable[[Config], Bench]] = {
    "cross_entropy": cross_entropy,
    "geglu": geglu,
    "swiglu": swiglu,
    "rope": rope,
    "jsd": jsd,
    "sparsemax": sparsemax,
    "multi_token_attention": multi_token_attention,
    "sparse_multi_token_attention": sparse_multi_token_attention,
    "fused_neighborhood_attention": fused_neighborhood_attention,
    "group_norm": group_norm,
    "relu_squared": relu_squared,
    "megatron_rms_norm": megatron_rms_norm,
    "kto_loss": losses.kto,
    "distill_jsd_loss": losses.distill_jsd,
    "fused_linear_grpo_loss_sequence": losses.grpo,
}
