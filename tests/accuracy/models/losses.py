"""Losses over a language model's head: preference, distillation and policy gradients.

Written from the definitions that the benchmark's scripts name, in the order of operations that its
reference classes follow, since that order decides what is alive at the peak.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from tests.accuracy.models.bench import Bench, Config, dtype_of, random
from tests.accuracy.models.philox import Generator

IGNORED = -100
SMS = 132
"""Multiprocessors of the card that the rows with seeded examples were measured on."""
EARLY_LENGTH = 4096
"""The first version of the script ran this length, and computed in the head's own precision."""


def _head(width: int, config: Config, *, bias: bool = False) -> nn.Linear:
    return nn.Linear(width, config["V"], bias=bias, device="cuda", dtype=dtype_of(config))


class TwoHeads(nn.Module):
    """A head that learns, and the head of the model it is compared with."""

    def __init__(self, width: int, other: int, config: Config, *, bias: bool = False) -> None:
        super().__init__()
        self.own = _head(width, config, bias=bias)
        self.reference = _head(other, config, bias=bias)


def _likelihood(logits: torch.Tensor, labels: torch.Tensor, ignored: int = IGNORED) -> torch.Tensor:
    """Mean log-probability of the labels of each sequence."""
    mask = labels != ignored
    labels = torch.where(labels == ignored, 0, labels)
    tokens = torch.gather(logits.log_softmax(-1), 2, labels.unsqueeze(2)).squeeze(2)
    return (tokens * mask).sum(-1) / mask.sum(-1)


def _odds_ratio(chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
    odds = (chosen - rejected) - (
        torch.log1p(-torch.exp(chosen)) - torch.log1p(-torch.exp(rejected))
    )
    return 0.1 * F.logsigmoid(odds)


def _contrast(chosen: torch.Tensor, rejected: torch.Tensor, *, margin: float = 0.0) -> torch.Tensor:
    """Contrastive preference (Xu et al., 2024), with SimPO's margin (Meng et al., 2024)."""
    logits = chosen - rejected
    if margin:
        logits = logits - margin
    return -F.logsigmoid(0.1 * logits) * (1 - 0.0) - F.logsigmoid(-0.1 * logits) * 0.0


def orpo(config: Config) -> Bench:
    """Compare by the odds ratio (Hong et al., 2024)."""
    return _preference(config, lambda chosen, rejected: -_odds_ratio(chosen, rejected))


def cpo(config: Config) -> Bench:
    return _preference(config, _contrast)


def simpo(config: Config) -> Bench:
    return _preference(config, partial(_contrast, margin=0.5 / 0.1))


def _preference(config: Config, compare: Callable[..., torch.Tensor]) -> Bench:
    """Log-likelihood of the chosen half, and the comparison of both halves."""
    # The kernel's module and the reference are both built; one of them is measured.
    head, other = (_head(config["H"], config) for _ in range(2))
    batch, length = config["B"], config["T"]
    x = random(batch, length, config["H"], config=config, gradient=True)
    targets = torch.randint(config["V"], (batch, length), device="cuda")
    half = batch // 2

    def early() -> torch.Tensor:
        logits = head(x)
        likelihood = F.cross_entropy(
            logits[:half].view(-1, logits.shape[-1]), targets[:half].view(-1)
        )
        each = F.log_softmax(logits, dim=-1).mean(dim=-1)
        return likelihood + compare(each[:half], each[half:]).mean()

    def forward() -> torch.Tensor:
        logits = (x @ head.weight.t()).float()
        likelihood = F.cross_entropy(
            logits[:half].view(-1, logits.shape[-1]), targets[:half].view(-1)
        )
        each = _likelihood(logits, targets)
        return likelihood + compare(each[:half], each[half:]).mean()

    return Bench(early if length == EARLY_LENGTH else forward, retain=False, kept=(other,))


def kto(config: Config) -> Bench:
    """Kahneman-Tversky optimization (Ethayarajh et al., 2024) of unpaired examples."""
    batch, length, width = config["B"], config["T"], config["H"]
    ignored = config["ignore_index"]
    heads, other = (TwoHeads(width, width, config, bias=config["bias"]) for _ in range(2))
    x = random(batch, length, width, config=config)
    targets = torch.randint(config["V"], (batch, length), device="cuda")
    preferred = torch.randint(2, (batch,), dtype=torch.bool, device="cuda")
    divergence = random(1, config=config)
    reference_x = random(batch, length, width, config=config)
    chosen = _preferred(config)
    counts = chosen, batch - chosen

    def split(values: torch.Tensor) -> list[torch.Tensor]:
        # Which examples are preferred is a matter of values; how many decides the sizes.
        return [values[torch.empty(count, dtype=torch.long, device="cuda")] for count in counts]

    def own() -> list[torch.Tensor]:
        outputs = x @ heads.own.weight.t()
        outputs = outputs + heads.own.bias
        logits = outputs.float()
        each = _likelihood(logits, targets, ignored)
        return split(each) + split(logits)

    @torch.no_grad()
    def reference() -> list[torch.Tensor]:
        logits = reference_x @ heads.reference.weight.t()
        logits = logits + heads.reference.bias
        return split(_likelihood(logits, targets, ignored))

    def losses() -> tuple[torch.Tensor, Any]:
        chosen, rejected, *logits = own()
        reference_chosen, reference_rejected = reference()
        gain = chosen - reference_chosen
        loss = rejected - reference_rejected
        both = torch.cat(
            (
                1 - F.sigmoid(config["beta"] * (gain - divergence)),
                1 - F.sigmoid(config["beta"] * (divergence - loss)),
            )
        )
        return both.mean(), [values.detach().sum() for values in (chosen, rejected, *logits)]

    return Bench(lambda: losses()[0], retain=False, kept=(other, preferred))


def _preferred(config: Config) -> int:
    """Count the preferred examples of a row that the seeded generator drew.

    The script seeds it once, and draws the same five tensors for every row: forward and full speed
    of both implementations, then memory of the kernel, then the rows that were measured.
    """
    generator = Generator(0, sms=SMS)
    batches = [2**power for power in range(1, 6)]
    before = batches * 5 + batches[: batches.index(config["B"])]
    for batch in before:
        for count in _drawn(batch, config):
            generator.skip(count)
    for count in _drawn(config["B"], config)[:2]:
        generator.skip(count)
    return int(generator.randint(2, config["B"]).sum())


def _drawn(batch: int, config: Config) -> tuple[int, ...]:
    tokens = batch * config["T"]
    return tokens * config["H"], tokens, batch, 1, tokens * config["H"]


def distill_jsd(config: Config) -> Bench:
    """Cross entropy, and the Jensen-Shannon divergence of a student and its teacher."""
    rows, width, vocabulary = config["BT"], config["H"], config["V"]
    heads, other = (TwoHeads(width // 2, width, config) for _ in range(2))
    base = torch.rand(rows, width // 2, device="cuda", dtype=dtype_of(config))
    unused = base.detach().clone().requires_grad_(True)
    x = base.detach().clone().requires_grad_(True)
    teacher_x = torch.rand(rows, width, device="cuda", dtype=dtype_of(config))
    targets = torch.randint(vocabulary, (rows,), device="cuda")

    def logits() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        outputs = x @ heads.own.weight.t()
        with torch.no_grad():
            teacher_outputs = teacher_x @ heads.reference.weight.t()
        student, teacher = outputs.float(), teacher_outputs.float()
        return student, teacher, F.cross_entropy(student, targets)

    def divergence(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
        student = F.log_softmax(student, dim=-1)
        teacher = F.log_softmax(teacher, dim=-1)
        middle = 0.5 * student.exp() + 0.5 * teacher.exp()
        middle = middle.log()
        forward = F.kl_div(middle, student, reduction="batchmean", log_target=True)
        backward = F.kl_div(middle, teacher, reduction="batchmean", log_target=True)
        return 0.5 * backward + 0.5 * forward

    def forward() -> torch.Tensor:
        student, teacher, hard = both = logits()
        # The temperature is applied to copies; those before it stay alive beside them.
        student = student / 1.0
        teacher = teacher / 1.0
        loss = 0.5 * hard + 0.5 * divergence(student, teacher)
        assert len(both) == 3
        return loss

    return Bench(forward, retain=False, kept=(other, base, unused))


def grpo(config: Config) -> Bench:
    """Group relative policy optimization (Shao et al., 2024), one ratio for a sequence."""
    batch, length, width = config["B"], config["T"], config["H"]
    heads, other = (TwoHeads(width, width, config) for _ in range(2))
    x = random(batch, length, width, config=config, gradient=True)
    chosen = torch.randint(config["V"], (batch, length), device="cuda")
    mask = torch.ones(batch, length, device="cuda")
    advantages = random(batch, config=config)
    reference_x = random(batch, length, width, config=config)

    def tokens(logits: torch.Tensor) -> torch.Tensor:
        return F.log_softmax(logits.float(), -1).gather(-1, chosen.unsqueeze(-1)).squeeze(-1)

    def forward() -> torch.Tensor:
        logits = x @ heads.own.weight.t()
        logs = F.log_softmax(logits.float(), dim=-1)
        own = logs.gather(-1, chosen.unsqueeze(-1)).squeeze(-1)
        with torch.no_grad():
            reference_logits = reference_x @ heads.reference.weight.t()
            reference = tokens(reference_logits)
        ratio = ((own - own.detach()) * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)
        ratio = torch.exp(ratio.unsqueeze(-1))
        clipped = torch.clamp(ratio, 0.8, 1.2)
        gains = advantages.unsqueeze(1)
        each = -torch.min(ratio * gains, clipped * gains)
        divergence = torch.exp(reference - own) - (reference - own) - 1.0
        each = each + 0.1 * divergence
        return (each * mask).sum() / torch.clamp(mask.sum(), min=1.0)

    return Bench(forward, retain=False, kept=(other,))
