"""The tolerance: rounding is never taken for a difference, and one percent never for rounding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import memfit.group
from memfit.batch import weights
from memfit.records import WorkloadInfo
from memfit.verify.splits import choose_splits
from memfit.verify.tolerance import UNIT_ROUNDOFF, tolerance
from memfit.verify.worker.equality import Equality
from memfit.verify.worker.examples import Splitter
from memfit.verify.worker.subject import Subject
from memfit.workload import LoadedWorkload, Workload

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

LAYERS = ("linear", "tanh", "gelu", "norm", "attention", "residual")


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """One random model and its data."""

    layers: tuple[str, ...]
    width: int
    positions: int
    scale: float
    examples: int
    microbatch: int
    seed: int
    dtype: str


@st.composite
def drawn(draw: st.DrawFn) -> Drawn:
    examples = draw(st.integers(2, 12))
    return Drawn(
        layers=tuple(draw(st.lists(st.sampled_from(LAYERS), min_size=1, max_size=6))),
        width=draw(st.sampled_from((2, 4, 8, 16))),
        positions=draw(st.integers(1, 6)),
        scale=10.0 ** draw(st.integers(-3, 3)),
        examples=examples,
        microbatch=draw(st.integers(1, examples - 1)),
        seed=draw(st.integers(0, 2**20)),
        dtype=draw(st.sampled_from(("float64", "float32"))),
    )


class _Block(torch.nn.Module):
    def __init__(self, kind: str, width: int) -> None:
        super().__init__()
        self.kind = kind
        self.inner = torch.nn.Linear(width, width)
        self.norm = torch.nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.inner(self.norm(x) if self.kind == "norm" else x)
        if self.kind == "tanh":
            return torch.tanh(y)
        if self.kind == "gelu":
            return torch.nn.functional.gelu(y)
        if self.kind == "attention":
            return torch.nn.functional.scaled_dot_product_attention(x, y, y)
        return x + y if self.kind == "residual" else y


def equality_of(model: Drawn) -> Equality:
    class Random(Workload):
        def model(self) -> torch.nn.Module:
            return torch.nn.Sequential(*(_Block(kind, model.width) for kind in model.layers))

        def batch(self, m: int) -> Any:
            inputs = torch.randn(m, model.positions, model.width) * model.scale
            lengths = torch.randint(1, model.positions + 1, (m, 1))
            return inputs, torch.arange(model.positions) < lengths

        def loss(self, model: Any, batch: Any) -> torch.Tensor:
            inputs, mask = batch
            squares = (model(inputs) - 1).square().mean(-1)
            return (squares * mask).sum() / mask.sum()

        def count(self, batch: Any) -> int:
            return int(batch[1].sum())

    info = WorkloadInfo(
        name="Random", description="", target="", path=None, sha256=None, parameters={}
    )
    subject = Subject(LoadedWorkload(make=Random, info=info), "cpu", model.seed)
    subject.use(getattr(torch, model.dtype))
    batch = subject.batch(model.examples)
    other = subject.batch(model.examples - 1)
    return Equality(
        subject,
        batch,
        Splitter(batch, model.examples, other, model.examples - 1),
        dtype=model.dtype,
        terms=max(model.examples * model.positions, model.width),
        held=[],
        tell=lambda _: None,
    )


@pytest.fixture(autouse=True)
def default_dtype() -> Iterator[None]:
    yield
    torch.set_default_dtype(torch.float32)


hundred = settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@hundred
@given(drawn())
def test_no_random_model_is_a_false_alarm(model: Drawn) -> None:
    equality = equality_of(model)
    for sizes in choose_splits(model.examples, model.microbatch):
        made = equality.split(sizes)
        assert made is not None
        assert made.equal, made


@hundred
@given(drawn(), st.data())
def test_one_percent_in_the_weight_of_one_microbatch_is_found_or_said_to_be_invisible(
    model: Drawn, data: st.DataObject
) -> None:
    equality = equality_of(model)
    sizes = choose_splits(model.examples, model.microbatch)[0]
    wrong = data.draw(st.integers(0, len(sizes) - 1))
    sign = data.draw(st.sampled_from((-1, 1)))

    def weighted(counts: Sequence[int], **facts: Any) -> tuple[float, ...]:
        right = weights(counts, **facts)
        return tuple(w * (1 + 0.01 * sign * (i == wrong)) for i, w in enumerate(right))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memfit.group, "weights", weighted)
        made = equality.split(sizes)

    assert made is not None
    assert made.visible is not None
    assert not made.equal or made.visible > 0.01, made
    if model.dtype == "float64" and model.scale <= 1:  # nothing saturates: always found
        assert not made.equal, made


def test_the_tolerance_grows_with_terms_and_with_what_the_network_does_to_rounding() -> None:
    unit = UNIT_ROUNDOFF["float32"]
    assert tolerance("float32", terms=1, amplification=0) == 40 * unit
    assert tolerance("float32", terms=10**6, amplification=1) == 8032 * unit
    assert tolerance("float32", terms=1, amplification=10) == 328 * unit
    assert 5e-10 < tolerance("float64", terms=1, amplification=0) < 7e-10
    assert tolerance("float64", terms=1, amplification=10**7) > 3e-8
