"""One accumulation group against the logical batch it stands for, in real numbers on the CPU."""

import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch import nn

from memfit.batch import weights
from memfit.errors import UsageError, WorkloadError
from memfit.group import run_group, to_device


def linear(seed=0):
    torch.manual_seed(seed)
    return nn.Linear(16, 1)


def examples(count=32):
    torch.manual_seed(1)
    return torch.randn(count, 16), torch.randn(count, 1)


def mean_square(model, batch):
    inputs, targets = batch
    return (model(inputs) - targets).square().mean()


class Recording(torch.optim.SGD):
    """SGD that keeps the gradients it was given."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.0)
        self.seen = []

    def step(self, closure=None):
        group = self.param_groups[0]["params"]
        self.seen.append([p.grad.clone() for p in group])
        return super().step(closure)


def accumulated_gradient(sizes, **changes):
    model = linear()
    optimizer = Recording(model.parameters())
    inputs, targets = examples(sum(sizes))
    microbatches = list(zip(inputs.split(sizes), targets.split(sizes), strict=True))
    run_group(model, optimizer, microbatches, loss=mean_square, counts=sizes, **changes)
    assert len(optimizer.seen) == 1
    return optimizer.seen[0]


def full_gradient(count):
    model = linear()
    mean_square(model, examples(count)).backward()
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("sizes", [(8, 8, 8, 8), (8, 8, 8, 5), (32,), (22, 21, 21), (1, 31)])
def test_the_accumulated_gradient_is_that_of_the_logical_batch(sizes):
    for ours, theirs in zip(accumulated_gradient(sizes), full_gradient(sum(sizes)), strict=True):
        # 1.6e-7 relative for 4 equal microbatches of Linear(16, 1) in float32.
        torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=2e-7)


@pytest.mark.parametrize("counts", [[512, 1536], [torch.tensor(512), torch.tensor(1536)]])
def test_means_of_unequal_microbatches_count_by_their_elements(counts):
    # 512 tokens at a mean of 2 and 1,536 at 4 make 3.5, not 3.
    value = torch.zeros(1, requires_grad=True)
    model = nn.Linear(1, 1)
    means = {"a": 2.0, "b": 4.0}
    outcome = run_group(
        model,
        torch.optim.SGD([value], lr=0.1),
        ["a", "b"],
        loss=lambda _, name: value.sum() + means[name],
        counts=counts,
    )

    assert outcome.loss.item() == pytest.approx(3.5)


def test_replicas_that_are_averaged_give_the_gradient_of_the_whole():
    inputs, targets = examples(16)
    gradients = []
    for share in (slice(0, 12), slice(12, 16)):
        model = linear()
        optimizer = Recording(model.parameters())
        size = share.stop - share.start
        run_group(
            model,
            optimizer,
            [(inputs[share], targets[share])],
            loss=mean_square,
            counts=[size],
            total_count=16,
            replicas=2,
        )
        gradients.append(optimizer.seen[0])
    averaged = [(a + b) / 2 for a, b in zip(*gradients, strict=True)]

    for ours, theirs in zip(averaged, full_gradient(16), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=2e-7)


def test_the_gradient_is_clipped_once_as_a_whole():
    clipped = accumulated_gradient((8, 8, 8, 8), clip_norm=0.01)
    norm = math.sqrt(sum(g.square().sum().item() for g in clipped))

    assert norm == pytest.approx(0.01, rel=1e-3)


def test_phases_come_in_order():
    phases = []
    model = linear()
    run_group(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        [examples(4), examples(4)],
        loss=mean_square,
        counts=[4, 4],
        on_phase=lambda phase, microbatch: phases.append((phase, microbatch)),
    )

    assert phases == [
        ("forward", 0),
        ("backward", 0),
        ("forward", 1),
        ("backward", 1),
        ("optimizer_step", None),
        ("group_done", None),
    ]


def test_gradients_are_gone_after_the_group():
    model = linear()
    run_group(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        [examples(4)],
        loss=mean_square,
        counts=[4],
    )

    assert all(p.grad is None for p in model.parameters())


class Synchronised(nn.Module):
    """Counts how often its gradients would be reduced, as a data-parallel wrapper does."""

    def __init__(self):
        super().__init__()
        self.inner = linear()
        self.synchronised = []
        self._on = True

    def no_sync(self):
        from contextlib import contextmanager

        @contextmanager
        def context():
            self._on = False
            yield
            self._on = True

        return context()

    def forward(self, x):
        self.synchronised.append(self._on)
        return self.inner(x)


def test_only_the_last_microbatch_reduces_gradients():
    model = Synchronised()
    run_group(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        [examples(4)] * 3,
        loss=mean_square,
        counts=[4] * 3,
    )

    assert model.synchronised == [False, False, True]


def test_a_scaler_that_finds_infinity_skips_the_step_and_says_so():
    model = linear()
    before = model.weight.detach().clone()
    outcome = run_group(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        [examples(4)],
        loss=lambda m, b: mean_square(m, b) * 1e38,
        counts=[4],
        scaler=torch.amp.GradScaler("cpu"),
        clip_norm=1.0,
    )

    assert not outcome.step_applied
    assert torch.equal(before, model.weight)


def test_a_scaler_unscales_before_the_step():
    model = linear()
    outcome = run_group(
        model,
        recording := Recording(model.parameters()),
        [examples(32)],
        loss=mean_square,
        counts=[32],
        scaler=torch.amp.GradScaler("cpu", init_scale=1024.0),
    )

    assert outcome.step_applied
    for ours, theirs in zip(recording.seen[0], full_gradient(32), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_nothing_that_holds_a_graph_outlives_its_microbatch():
    import gc
    import weakref

    model = linear()
    graphs: list[weakref.ref[torch.Tensor]] = []
    alive = []

    def loss(m, batch):
        alive.append([ref() is not None for ref in graphs])
        value = mean_square(m, batch)
        graphs.append(weakref.ref(value))
        return value

    run_group(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        [examples(4)] * 3,
        loss=loss,
        counts=[4] * 3,
    )
    gc.collect()

    assert alive == [[], [False], [False, False]]


@pytest.mark.parametrize("given", [1, 3])
def test_a_wrong_number_of_microbatches_is_refused(given):
    model = linear()
    with pytest.raises(WorkloadError, match="2 counts were given"):
        run_group(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            [examples(4)] * given,
            loss=mean_square,
            counts=[4, 4],
        )


def test_weights_are_shares_of_the_group():
    assert weights([8, 8, 8, 5]) == pytest.approx([8 / 29, 8 / 29, 8 / 29, 5 / 29])


class Pair(NamedTuple):
    left: torch.Tensor
    right: int


@dataclass
class Fields:
    x: torch.Tensor
    label: str


def test_every_tensor_of_a_nest_is_moved():
    batch = {
        "list": [torch.ones(1)],
        "pair": Pair(torch.ones(1), 2),
        "fields": Fields(torch.ones(1), "a"),
        "ordered": OrderedDict(x=torch.ones(1)),
    }
    moved = to_device(batch, torch.device("meta"))

    assert moved["list"][0].is_meta
    assert moved["pair"].left.is_meta
    assert moved["pair"].right == 2
    assert moved["fields"].x.is_meta
    assert moved["fields"].label == "a"
    assert moved["ordered"]["x"].is_meta


@pytest.mark.parametrize("precision", ["fp16", "fp64"])
def test_a_precision_that_would_train_something_else_is_refused(precision):
    model = linear()
    with pytest.raises(UsageError):
        run_group(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            [examples(4)],
            loss=mean_square,
            counts=[4],
            precision=precision,
        )
