"""Single operators: the peak of one call of ten, with the gradients of earlier calls kept.

Each operator is written here from its definition. The table that was measured gives shapes and
types, not operations; where a definition leaves a choice (an fp32 copy, the order of a sum), the
choice is the one that the smallest row of the operator agrees with, and the other rows test it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

CALLS = 10
ALWAYS_FULL = frozenset({"group_norm"})
"""Operators whose rows are alike in every mode: all of them ran forward and backward."""
Config = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Bench:
    """One operator, ready to be called."""

    forward: Callable[[], Any]
    gradient: Callable[[], Any] = lambda: None
    """Makes the gradient of the output; the default is that of a scalar."""
    inputs: tuple[torch.Tensor, ...] = ()
    """Where only the gradients of these are wanted, and they are not kept."""
    retain: bool = True
    """Whether the graph stays after backward."""
    kept: tuple[Any, ...] = ()
    """What else is alive while the operator is measured."""

    def backward(self, output: Any, gradient: Any) -> None:
        """Run backward once."""
        if self.inputs:
            torch.autograd.grad(output, self.inputs, gradient, retain_graph=self.retain)
        else:
            output.backward(gradient, retain_graph=self.retain)


def measure(*, operator: str, config: Config, mode: str) -> dict[str, Any]:
    """Return the median peak of ten calls."""
    bench = OPERATORS[operator](config)
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

    peaks = []
    for _ in range(CALLS):
        torch.cuda.reset_peak_memory_stats()
        call()
        peaks.append(torch.cuda.max_memory_allocated())
    peaks.sort()
    return {"peak_allocated_bytes": (peaks[CALLS // 2 - 1] + peaks[CALLS // 2]) // 2}


def _forget_gradients(bench: Bench) -> None:
    for thing in bench.kept:
        for tensor in thing.parameters() if isinstance(thing, nn.Module) else (thing,):
            tensor.grad = None


def _dtype(config: Config) -> torch.dtype:
    kind = getattr(torch, config.get("dtype", "torch.float32").removeprefix("torch."))
    assert isinstance(kind, torch.dtype)
    return kind


def _random(*shape: int, config: Config, gradient: bool = False) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=_dtype(config), requires_grad=gradient)


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
    x = _random(batch, config["T"], config["hidden_size"], config=config, gradient=True)
    layer = Gated(config["hidden_size"], config["intermediate_size"], activation)
    layer = layer.to("cuda").to(_dtype(config))
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
    query = _random(1, length, heads, width, config=config, gradient=True).transpose(1, 2)
    key = _random(1, length, key_heads, width, config=config, gradient=True).transpose(1, 2)
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
    x = _random(config["B"] * config["T"], config["V"], config=config, gradient=True)
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


def project_all(x: torch.Tensor) -> torch.Tensor:
    """Project the last dimension onto the simplex, all of it seen by autograd."""
    ordered = torch.sort(x, dim=-1, descending=True)[0]
    sums = ordered.cumsum(-1)
    ranks = torch.arange(1, x.size(-1) + 1, device=x.device, dtype=x.dtype)
    support = ((1 + ranks * ordered) > sums).sum(-1, keepdim=True)
    threshold = (sums.gather(-1, support - 1) - 1) / support.to(x.dtype)
    return torch.clamp(x - threshold, min=0)


def _token_attention(config: Config, normalize: Callable[[torch.Tensor], torch.Tensor]) -> Bench:
    """Causal scores, normalized, mixed over neighbouring keys and queries by a convolution."""
    length = config["L"]
    scores = _random(config["B"], config["C_in"], length, length, config=config, gradient=True)
    size = config["K"]
    other, mixer = (
        nn.Conv2d(
            config["C_in"], config["C_out"], size, padding=size // 2, groups=config["groups"]
        ).to("cuda", _dtype(config))
        for _ in range(2)
    )

    def forward() -> torch.Tensor:
        mask = torch.tril(torch.ones(length, length, dtype=torch.bool, device="cuda")).view(
            1, 1, length, length
        )
        lowest = torch.tensor(-1e9, device="cuda", dtype=scores.dtype)
        weights = normalize(scores.masked_fill(~mask, lowest))
        mixed: torch.Tensor = mixer(weights)
        return mixed.masked_fill(~mask, torch.tensor(0.0, device="cuda", dtype=scores.dtype))

    shape = (config["B"], config["C_out"], length, length)
    return Bench(forward, lambda: _random(*shape, config=config), kept=(other,))


def multi_token_attention(config: Config) -> Bench:
    return _token_attention(config, lambda x: F.softmax(x, dim=-1))


def sparse_multi_token_attention(config: Config) -> Bench:
    return _token_attention(config, project_all)


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
    x = _random(*shape, config=config, gradient=True)
    return Bench(lambda: layer(x), lambda: torch.randn_like(x), kept=(other,))


def group_norm(config: Config) -> Bench:
    channels = config["C"]
    x = _random(config["M"], channels, config["H"], config=config, gradient=True)
    # As above: two implementations are built, with a set of parameters each.
    other, norm = (
        nn.GroupNorm(channels // config["channels_per_group"], channels, eps=config["eps"]).to(
            "cuda"
        )
        for _ in range(2)
    )
    return Bench(lambda: norm(x), lambda: torch.randn_like(x), kept=(other,))


def relu_squared(config: Config) -> Bench:
    x = _random(config["N"], config=config, gradient=True)
    return Bench(lambda: F.relu(x) ** 2, lambda: torch.randn_like(x))


def megatron_rms_norm(config: Config) -> Bench:
    shape = (config["S"], config["B"], config["H"])
    x = torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    norm = nn.RMSNorm(config["H"], device="cuda", dtype=torch.bfloat16)
    # A gradient for the output is made beside it, and the sum is what backward starts from.
    return Bench(lambda: norm(x).sum(), kept=(torch.randn_like(x),))


def _head(width: int, config: Config, *, bias: bool = False) -> nn.Linear:
    return nn.Linear(width, config["V"], bias=bias, device="cuda", dtype=_dtype(config))


def _preference(config: Config) -> Bench:
    """Head, log-probabilities of chosen and rejected halves, their odds ratio, and the NLL."""
    batch, length = config["B"], config["T"]
    other, head = (_head(config["H"], config) for _ in range(2))
    x = _random(batch, length, config["H"], config=config, gradient=True)
    targets = torch.randint(config["V"], (batch, length), device="cuda")
    half = batch // 2

    def forward() -> torch.Tensor:
        logits = (x @ head.weight.t()).float()
        likelihood = F.cross_entropy(
            logits[:half].view(-1, logits.shape[-1]), targets[:half].view(-1)
        )
        mask = targets != -100
        places = torch.where(mask, targets, 0)
        tokens = torch.gather(logits.log_softmax(-1), 2, places.unsqueeze(2)).squeeze(2)
        each = (tokens * mask).sum(-1) / mask.sum(-1)
        chosen, rejected = each[:half], each[half:]
        odds = (chosen - rejected) - (
            torch.log1p(-torch.exp(chosen)) - torch.log1p(-torch.exp(rejected))
        )
        return likelihood - F.logsigmoid(odds).mean()

    return Bench(forward, retain=False, kept=(other,))


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
    "fused_linear_orpo_loss": _preference,
    "fused_linear_cpo_loss": _preference,
    "fused_linear_simpo_loss": _preference,
}
