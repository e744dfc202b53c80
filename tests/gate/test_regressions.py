"""Changes made on purpose: what needs more memory is caught and blamed on its line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from memfit.baseline import Baseline, read_baseline, write_baseline
from memfit.gate import Comparison, Limits
from memfit.gate_run import GateRequest, NewSettings, check, update
from memfit.records import Precision
from memfit.units import MIB

pytestmark = pytest.mark.virtual
SOURCE = (Path(__file__).parents[1] / "workloads" / "distilled.py").read_text()
GROUP = NewSettings(
    device="rtx-4090", precision=Precision.BF16, microbatch=16, accumulation_steps=2
)


def silent(_sentence: str) -> None:
    """Tell nobody."""


@pytest.fixture(scope="module")
def baseline(tmp_path_factory: pytest.TempPathFactory) -> Baseline:
    folder = tmp_path_factory.mktemp("baseline")
    before = Path.cwd()
    os.chdir(folder)
    try:
        (folder / "model.py").write_text(SOURCE)
        update(GateRequest(targets=("model.py",)), GROUP, silent)
        return read_baseline(folder / "memfit-baseline.json")
    finally:
        os.chdir(before)


class Repository:
    """A checkout with a baseline, whose model is changed."""

    def __init__(self, folder: Path, baseline: Baseline) -> None:
        self.path = folder / "model.py"
        self.source = SOURCE
        write_baseline(folder / "memfit-baseline.json", baseline)

    def change(self, before: str, after: str) -> None:
        assert before in self.source, before
        self.source = self.source.replace(before, after)

    def line(self, text: str) -> str:
        numbers = [n for n, line in enumerate(self.source.splitlines(), 1) if text in line]
        assert len(numbers) == 1, (text, numbers)
        return f"model.py:{numbers[0]}"

    def gate(self, **limits: int) -> Comparison:
        self.path.write_text(self.source)
        return check(GateRequest(limits=Limits(**limits)), silent).workloads[0]


@pytest.fixture
def repository(tmp_path: Path, baseline: Baseline, monkeypatch: pytest.MonkeyPatch) -> Repository:
    monkeypatch.chdir(tmp_path)
    return Repository(tmp_path, baseline)


def blamed(found: Comparison) -> list[tuple[str, str, str | None]]:
    """What grew by more than a mebibyte, the largest first."""
    return [(c.category, c.module, c.place) for c in found.changes if c.bytes > MIB]


def assert_explained(found: Comparison) -> None:
    """The changes sum to what the explained phase grew by."""
    figure = next(f for f in found.figures if f.phase == found.explained)
    before, now = figure.allocated_bytes
    assert before is not None
    assert now is not None
    assert sum(change.bytes for change in found.changes) == now - before


REGRESSIONS = {
    "a retained activation": (
        ("        return logits, loss", "        self.last = logits\n        return logits, loss"),
        ("activations", "logits = self.head(x)"),
    ),
    "a lost no_grad": (
        ("        with torch.no_grad():\n            t", "        if True:\n            t"),
        ("activations", "taught = F.gelu(self.inner(x))"),
    ),
    "a duplicated parameter": (
        ("        self.head.weight = self.token.weight\n", ""),
        ("optimizer state", "self.head = nn.Linear("),
    ),
    "an optimizer with one more state": (
        ("lr=1e-3)", "lr=1e-3, amsgrad=True)"),
        ("optimizer state", "return torch.optim.AdamW("),
    ),
    "checkpointing dropped": (
        ("x = checkpoint(block, x, use_reentrant=False)", "x = block(x)"),
        ("activations", "hidden = F.gelu(hidden)"),
    ),
    "a cast to float64": (
        ("logits.float()", "logits.double()"),
        ("temporary", "flat = logits.double()"),
    ),
    "a larger copy of the logits": (
        ("        return F.cross", "        flat = flat.tanh() * 30.0\n        return F.cross"),
        ("activations", "flat = flat.tanh() * 30.0"),
    ),
}


@pytest.mark.parametrize("name", REGRESSIONS)
def test_a_regression_is_caught_and_blamed_on_its_line(name: str, repository: Repository) -> None:
    edit, (category, line) = REGRESSIONS[name]
    repository.change(*edit)
    found = repository.gate()

    assert (found.verdict, found.mark) == ("more", "+")
    assert_explained(found)
    # The line that an annotation names.
    first = (*found.suspects, *found.changes)[0]
    assert (first.category, first.place) == (category, repository.line(line))


NORM, UP = "self.norm = nn.LayerNorm(width)", "self.up = nn.Linear(width, 4 * width)"
HARMLESS = {
    "renamed modules, functions and variables": [
        ("self.up", "self.widen"),
        ("self.down", "self.narrow"),
        ("hidden", "inner"),
        ("class Block", "class FeedForward"),
        ("Block(width)", "FeedForward(width)"),
        ("self.blocks", "self.layers"),
    ],
    "independent code in another order, and moved lines": [
        (
            f"        {NORM}\n        {UP}\n",
            f"        {UP}\n        {NORM}\n",
        ),
        (
            "        loss = F.mse_loss(x, target)\n        logits = self.head(x)\n",
            "        logits = self.head(x)\n        loss = F.mse_loss(x, target)\n",
        ),
        ("import memfit\n", "import memfit\n\n# A comment.\n# Another.\n"),
    ],
}


@pytest.mark.parametrize("name", HARMLESS)
def test_a_harmless_change_passes(name: str, repository: Repository) -> None:
    for before, after in HARMLESS[name]:
        repository.change(before, after)
    found = repository.gate()

    assert not found.fails
    assert blamed(found) == []


def test_a_regression_among_renames_and_moved_lines_is_blamed_alone(
    repository: Repository,
) -> None:
    for edits in (*HARMLESS.values(), [("lr=1e-3)", "lr=1e-3, amsgrad=True)")]):
        for before, after in edits:
            if before in repository.source:
                repository.change(before, after)
    found = repository.gate()

    assert found.verdict == "more"
    assert {(category, place) for category, _, place in blamed(found)} == {
        ("optimizer state", repository.line("return torch.optim.AdamW("))
    }


def test_a_saving_is_shown_and_passes(repository: Repository) -> None:
    repository.change("range(6)", "range(2)")
    found = repository.gate()

    assert (found.verdict, found.mark) == ("less", "-")
    assert all(change.bytes < 0 for change in found.changes if abs(change.bytes) > MIB)
    assert_explained(found)
