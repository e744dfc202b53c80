"""What calls of a compiled kernel left alive for the rows that ran after them: inferences.

torch.compile kept what a call that it compiled for was given, in cycles that Python collects when
it gets to it. Such a kernel was compiled for the first batch, and for all others at the second.
"""

from __future__ import annotations

import torch

from tests.accuracy.models.bench import Config, random


def by_a_pair(config: Config) -> list[torch.Tensor]:
    """Allocate what one call of a kernel of chosen and rejected examples holds.

    Every row is higher by the same bytes, whatever its batch: 2,084.05 MiB at 1,024 tokens,
    2,324.19 MiB at 4,096. Two heads are 2,004 MiB, and what remains grows as the tokens. It is, to
    the last byte, what one call of the kernel at a batch of four holds: the head's weight and its
    gradient, the input and its gradient, the last pair of chosen and rejected input, the targets of
    both, and a sum.
    """
    batch, length, width = 4, config["T"], config["H"]
    weights = [random(config["V"], width, config=config) for _ in range(2)]
    inputs = [random(batch, length, width, config=config) for _ in range(2)]
    pair = random(2, length, width, config=config)
    targets = [_numbers(n, length) for n in (batch, 2)]
    return [*weights, *inputs, pair, *targets, torch.zeros((), device="cuda")]


def by_unpaired(config: Config) -> list[torch.Tensor]:
    """Allocate what two calls of the kernel of unpaired examples hold.

    Every row is higher by nearly the same 1,265.5 MiB. Liger's kernel of that time (0.5.4), run
    with torch 2.5.1 on a virtual card in the order of the script, leaves these once Python has
    collected the first compiled call: of the second one, with four examples, timed forward, both
    heads' weights and one bias; of the first one for memory, with two, which another bias makes a
    new compilation, these with their biases and the gradients of the head that learns; and of both
    the inputs, the targets, the labels and the divergence. One sum more fits the figures.
    """
    length, width = config["T"], config["H"]
    tensors = []
    for batch, weights, biases in ((4, 2, 1), (2, 3, 3)):
        tensors += [random(config["V"], width, config=config) for _ in range(weights)]
        tensors += [random(config["V"], config=config) for _ in range(biases)]
        tensors += [random(batch, length, width, config=config) for _ in range(2)]
        tensors += [_numbers(batch, length), _numbers(batch), random(1, config=config)]
    return [*tensors, torch.zeros((), device="cuda")]


def by_distillation(config: Config) -> list[torch.Tensor]:
    """Allocate what two calls of the kernel of a student and its teacher hold.

    Every row is higher by nearly the same 5,062 MiB. Liger's kernel (0.5.0, with the script's
    divergence), run with torch 2.5.1 on a virtual card, leaves this much and 2 MiB where the first
    calls, with 1,024 and 2,048 rows, are followed by backward, and Python collects when it likes:
    the weights of both heads, the student's gradient as it is kept and as the kernel summed it, the
    inputs of both, the gradient of the student's, and the targets. Its ten blocks of 501 MiB are
    taken from segments of 502, and count whole or not, by what the cache held before: six did in
    that run, four in the table.
    """
    width = config["H"]
    tensors = []
    for rows in (1024, 2048):
        tensors += [random(config["V"], width // 2, config=config) for _ in range(3)]
        tensors.append(random(config["V"], width, config=config))
        tensors.append(random(rows, width, config=config))
        tensors += [random(rows, width // 2, config=config) for _ in range(2)]
        tensors.append(_numbers(rows))
    return tensors


def _numbers(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.long, device="cuda")
