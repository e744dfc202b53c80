"""A mixture of experts, one expert after another, as reference implementations compute it."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812

from tests.accuracy.models.bench import Bench, Config, random
from tests.accuracy.models.philox import Generator

SEED = 42
"""What the benchmark's script seeds the card's generator with, before each row."""
SMS = 132
"""Multiprocessors of the card that was measured; the generator's numbers depend on them."""


def routed(config: Config) -> list[int]:
    """Return how many tokens each expert gets: the choice of the seeded generator's numbers."""
    names = ("T", "E", "H", "intermediate_dim", "K")
    return _routed(*(config[name] for name in names))


@cache
def _routed(tokens: int, experts: int, width: int, hidden: int, chosen: int) -> list[int]:
    generator = Generator(SEED, sms=SMS)
    generator.skip(tokens * width)
    generator.skip(experts * 2 * hidden * width)
    generator.skip(experts * width * hidden)
    scores = torch.from_numpy(generator.randn(tokens * experts)).view(tokens, experts)
    experts_of = torch.topk(scores.float(), chosen, dim=-1).indices
    return torch.bincount(experts_of.flatten(), minlength=experts).tolist()


def inputs(config: Config) -> tuple[Any, ...]:
    """Return tokens, both weights, the choice, its weights, and all that have a gradient."""
    tokens, experts, width = config["T"], config["E"], config["H"]
    hidden = config["intermediate_dim"]
    x = random(tokens, width, config=config, gradient=True)
    # The leaves are the numbers before scaling, which autograd keeps beside the scaled ones.
    gate_leaf = random(experts, 2 * hidden, width, config=config, gradient=True)
    gates = gate_leaf * 0.02
    down_leaf = random(experts, width, hidden, config=config, gradient=True)
    downs = down_leaf * 0.02
    scores = torch.randn(tokens, experts, device="cuda")
    chosen = torch.topk(scores, config["K"], dim=-1).indices.to(torch.int32)
    weights = torch.softmax(torch.gather(scores, 1, chosen.long()), dim=-1)
    weights = weights.to(x.dtype).requires_grad_()
    return x, gates, downs, chosen, weights, (x, gate_leaf, down_leaf, weights)


def fused_moe(config: Config) -> Bench:
    """Gated experts; each takes its tokens, and adds its weighted output to theirs."""
    experts = config["E"]
    counts = routed(config)
    x, gates, downs, chosen, weights, leaves = inputs(config)

    def forward() -> torch.Tensor:
        result = torch.zeros_like(x)
        with torch.no_grad():
            mask = F.one_hot(chosen.long(), num_classes=experts).permute(2, 1, 0)
            assert torch.greater(mask.sum(dim=(-1, -2)), 0).shape == (experts,)
            hit = torch.empty(experts - counts.count(0), 1, dtype=torch.long, device="cuda")
        for expert, count in enumerate(counts):
            if not count:
                continue
            # What `torch.where` of the expert's mask returns: two columns of one tensor.
            places = torch.empty(2, count, dtype=torch.long, device="cuda").t()
            rank, token = places.unbind(1)
            current = x[token]
            gate, up = F.linear(current, gates[expert]).chunk(2, dim=-1)
            current = F.silu(gate) * up
            current = F.linear(current, downs[expert])
            current = current * weights[token, rank, None]
            result.index_add_(0, token, current)
        assert hit.shape[1] == 1
        return result

    return Bench(forward, lambda: torch.randn_like(x), kept=leaves)
