"""Workloads: the reference that is equal, and broken ones that are each found under one code."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from memfit.verification import Outcome
from tests.verify.checking import check, codes, line_of, outcome

if TYPE_CHECKING:
    from pathlib import Path

REFERENCE = """
def model():
    return nn.Linear(16, 1)

def batch(m):
    return torch.randn(m, 16), torch.randn(m, 1)

def loss(model, batch):
    inputs, targets = batch
    return F.mse_loss(model(inputs), targets)
"""

TOKENS = """
class Tokens(memfit.Workload):
    def model(self):
        return nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 11))

    def batch(self, m):
        labels = torch.randint(11, (m, 9))
        for row in range(m):
            labels[row, 1 + row % 8 :] = -100
        return {"ids": torch.randint(11, (m, 9)), "labels": labels}

    def loss(self, model, batch):
        return F.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["labels"].flatten())

    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.1)
"""
COUNT = """
    def count(self, batch):
        return int((batch["labels"] != -100).sum())
"""


def test_the_reference_is_equal_within_rounding(tmp_path: Path) -> None:
    found = check(tmp_path, REFERENCE, logical_batch=32, microbatch=8)

    assert codes(found) == []
    assert found.comparisons[0].sizes == (8, 8, 8, 8)
    assert {c.dtype for c in found.comparisons} == {"float64", "float32"}
    assert all(c.equal for c in found.comparisons)
    in32 = found.comparisons[-1]
    assert in32.dtype == "float32"
    assert in32.error < 1.6e-7
    assert outcome(found) is Outcome.EQUAL


def test_microbatches_of_8_8_8_5_are_equal_when_they_are_weighted(tmp_path: Path) -> None:
    found = check(tmp_path, REFERENCE, logical_batch=29, microbatch=8)

    assert found.comparisons[0].sizes == (8, 8, 8, 5)
    assert outcome(found) is Outcome.EQUAL


@pytest.mark.parametrize("count", [COUNT, COUNT.replace("int(", "(")], ids=["int", "tensor"])
def test_a_token_weighted_model_with_padding_is_clean(count: str, tmp_path: Path) -> None:
    found = check(tmp_path, TOKENS + count)

    assert codes(found) == []
    assert outcome(found) is Outcome.EQUAL
    assert found.loss is not None
    assert (found.loss.kind, found.loss.over) == ("mean", "elements")
    assert found.loss.counts == (1, 2, 3, 4, 5, 6, 7, 8)


def test_a_layer_that_refuses_a_microbatch_of_one_is_the_layer_s_finding(tmp_path: Path) -> None:
    source = REFERENCE.replace(
        "nn.Linear(16, 1)", "nn.Sequential(nn.Linear(16, 1), nn.BatchNorm1d(1))"
    )
    found = check(tmp_path, source, logical_batch=4)

    assert found.comparisons[0].sizes == (1, 1, 1, 1)
    assert codes(found) == ["MF301"]
    assert "is not defined" in found.findings[0].evidence
    assert all(c.equal for c in found.comparisons)


@pytest.mark.parametrize(
    "narrow",
    [
        "F.mse_loss(model(inputs).float(), targets.float())",
        "F.mse_loss(model(inputs).bfloat16().to(torch.float32), targets)",
        "F.mse_loss(model(inputs), targets.to(torch.float32)).to(torch.float32)",
        "narrowed(model, inputs, targets)",
    ],
)
def test_a_model_that_casts_by_itself_is_compared_in_float64_all_the_same(
    narrow: str, tmp_path: Path
) -> None:
    source = REFERENCE.replace("F.mse_loss(model(inputs), targets)", narrow)
    source += """
def narrowed(model, inputs, targets):
    with torch.autocast("cpu", torch.bfloat16):
        return F.mse_loss(model(inputs).float(), targets)
"""
    found = check(tmp_path, source)

    assert codes(found) == []
    assert found.notes == []
    assert {c.dtype for c in found.comparisons[:-1]} == {"float64"}
    assert all(c.equal for c in found.comparisons)
    assert all(c.visible is not None and c.visible < 1e-7 for c in found.comparisons[:-1])


def test_what_a_wrong_weight_would_have_to_be_is_said_and_is_true(tmp_path: Path) -> None:
    right = check(tmp_path, REFERENCE)
    least = max(c.visible or 0.0 for c in right.comparisons[:-1])
    assert 0 < least < 1e-7

    wrong = REFERENCE.replace(
        "F.mse_loss(model(inputs), targets)",
        f"F.mse_loss(model(inputs), targets) * (1 + {4 * least} * (len(inputs) == 3))",
    )
    found = check(tmp_path, wrong)
    assert [c.equal for c in found.comparisons if 3 in c.sizes] == [False]
    assert outcome(found) is Outcome.DIFFERENT


@pytest.mark.parametrize("examples", [2, 3])
def test_a_layer_that_refuses_half_of_the_batch_is_found_all_the_same(
    examples: int, tmp_path: Path
) -> None:
    source = REFERENCE.replace(
        "nn.Linear(16, 1)", "nn.Sequential(nn.Linear(16, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))"
    )
    found = check(tmp_path, source, logical_batch=examples)

    assert codes(found) == ["MF301"]
    assert "1 layer changed" in found.findings[0].evidence
    assert all(c.equal for c in found.comparisons)


BROKEN = {
    "MF106": (
        REFERENCE.replace(
            "F.mse_loss(model(inputs), targets)",
            "F.mse_loss(torch.sin(1e4 * only_float32(model(inputs))), targets)",
        )
        + """
def only_float32(x):
    assert x.dtype == torch.float32
    return x
""",
        "def loss",
    ),
    "MF201": (TOKENS, "def loss"),
    "MF202": (REFERENCE.replace("targets)", "targets, reduction='sum')"), "def loss"),
    "MF101": (
        REFERENCE.replace("targets)", "targets, reduction='sum') / len(inputs) ** 0.5"),
        "def loss",
    ),
    "MF203": (REFERENCE.replace("targets)", "targets) / 4"), "def loss"),
    "MF205": (TOKENS + COUNT.replace('(batch["labels"] != -100).sum()', "9"), "def count"),
    "MF206": (TOKENS + COUNT.replace("int(", "float("), "def count"),
    "MF103": (REFERENCE.replace("(inputs), targets)", "(inputs).log(), targets)"), "def loss"),
    "MF104": (
        REFERENCE.replace("(m, ", "(7, "),
        "def batch",
    ),
    "MF105": (
        REFERENCE.replace(
            "nn.Linear(16, 1)", "nn.ModuleList([nn.Linear(16, 1), nn.Linear(2, 2)])"
        ).replace("model(inputs)", "model[0](inputs)"),
        "def loss",
    ),
    "MF301": (
        REFERENCE.replace("nn.Linear(16, 1)", "nn.Sequential(nn.Linear(16, 1), nn.BatchNorm1d(1))"),
        "model(inputs)",
    ),
    "MF302": (
        """
        class Counted(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = nn.Linear(16, 1)
                self.register_buffer("seen", torch.zeros(()))

            def forward(self, x):
                self.seen.mul_(0.9).add_(x.detach().abs().mean())
                return self.inner(x)
        """
        + REFERENCE.replace("nn.Linear(16, 1)", "Counted()").replace("\n", "\n        "),
        "def forward",
    ),
    "MF303": (
        REFERENCE.replace("nn.Linear(16, 1)", "nn.Linear(16, 4)").replace(
            "F.mse_loss(model(inputs), targets)",
            "F.cross_entropy(model(inputs) @ model(inputs.flip(1)).T, torch.arange(len(inputs)))",
        ),
        "def loss",
    ),
    "MF304": (
        REFERENCE.replace(
            "return F.mse_loss(model(inputs), targets)",
            "model.calls = getattr(model, 'calls', 0) + 1\n"
            "    return F.mse_loss(model(inputs), targets) * 0.9 ** model.calls",
        ),
        "def loss",
    ),
    "MF401": (
        REFERENCE.replace("nn.Linear(16, 1)", "nn.Sequential(nn.Dropout(0.5), nn.Linear(16, 1))"),
        "model(inputs)",
    ),
    "MF402": (
        "import random\n" + REFERENCE.replace("targets)", "targets) + 0 * random.random()"),
        "def loss",
    ),
    "MF601": (
        REFERENCE + "\ndef optimizer(model):\n    return torch.optim.SGD([model.weight], lr=0.1)\n",
        "def optimizer",
    ),
    "MF603": (
        REFERENCE
        + """
class Twice(torch.optim.Adam):
    def step(self, closure=None):
        super().step(closure)
        super().step(closure)

def optimizer(model):
    return Twice(model.parameters(), lr=0.1)
""",
        "def optimizer",
    ),
    "MF102": (
        REFERENCE
        + """
class Noisy(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        for p in self.param_groups[0]["params"]:
            p.data += 1e-3 * torch.randn_like(p)

def optimizer(model):
    return Noisy(model.parameters(), lr=0.1)
""",
        "def optimizer",
    ),
}


@pytest.mark.parametrize("code", sorted(BROKEN))
def test_a_broken_workload_is_found_with_its_place_and_nothing_else(
    code: str, tmp_path: Path
) -> None:
    source, at = BROKEN[code]
    found = check(tmp_path, source)

    assert codes(found) == [code]
    place = found.findings[0].place
    assert place is not None
    assert place.line == line_of(source, at)
