"""Sparse tensors: their sizes are counts of rows, which a kernel finds out."""

from __future__ import annotations

from pathlib import Path

import pytest

from memfit import virtual
from memfit.records import Split, Verdict
from memfit.trial.runner import TrialRunner
from memfit.units import MIB
from tests.virtual.scripts import PRELUDE
from tests.virtual.test_values import CARD, spec

pytestmark = pytest.mark.virtual

WORKLOAD = Path(__file__).parents[1] / "workloads" / "sparse.py"
HEAD = (
    PRELUDE
    + """
from memfit.virtual import control
from memfit.virtual.values import ValueMode
noted, unanswered = [], []
control.listen(lambda size, kind: unanswered.append(size) if kind == control.UNKNOWN else None)

def entries(share, *tokens):
    table = nn.Embedding(100_000, 8, sparse=True, device="cuda")
    with ValueMode(share=share, note=noted.append):
        for each in tokens:
            table(torch.tensor(each, device="cuda")).sum().backward()
        return table.weight.grad.coalesce()._nnz()
known = [3, 3, 3, 8]
"""
)


def test_rows_that_are_known_are_counted(on_card):
    found = on_card(f"{HEAD}print(json.dumps([entries(1.0, known), noted, unanswered]))")

    assert found == [2, [], []]


@pytest.mark.parametrize(("share", "count"), [(1.0, 8), (0.5, 4), (0.0, 1)])
def test_of_rows_that_are_not_known_the_share_is_distinct(on_card, share, count):
    # Two gradients were added up: which of their rows are the same is not worked out.
    found = on_card(f"{HEAD}print(json.dumps([entries({share}, known, known), noted, unanswered]))")

    assert found == [count, ["shape"], []]


def test_steps_of_sparse_optimizers_read_nothing_that_has_no_answer(on_card):
    script = f"""{HEAD}
def steps(make):
    table = nn.Embedding(1000, 64, sparse=True, device="cuda")
    optimizer = make(table.parameters())
    for _ in range(2):
        table(torch.randint(1000, (4, 8), device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
with ValueMode(share=1.0, note=noted.append):
    steps(torch.optim.SparseAdam)
    steps(lambda p: torch.optim.SGD(p, 0.1))
    steps(torch.optim.Adagrad)
print(json.dumps([noted, unanswered]))
"""
    assert on_card(script) == [[], []]


@pytest.fixture(scope="module")
def train():
    environment = virtual.prepare(CARD, total_bytes=CARD.total_bytes)
    with TrialRunner(str(WORKLOAD), {}, environment=environment, load_timeout_s=300) as runner:
        runner.open()

        def trial(steps, share=1.0):
            split = Split(microbatch=4, accumulation_steps=steps)
            return runner.run(spec(split=split, group_microbatches=steps, data_dependent=share))

        yield trial


def test_a_group_with_sparse_gradients_is_measured(train):
    result = train(1)

    assert result.verdict is Verdict.FITS
    assert result.limits == ()
    assert result.composition is not None


def test_sparse_gradients_that_accumulate_are_taken_to_have_no_row_in_common(train):
    worst, none = train(2), train(2, share=0.0)

    assert worst.verdict is none.verdict is Verdict.FITS
    rows = 2 * 4 * 4096 * 64 * 4
    assert worst.peak_allocated_bytes - none.peak_allocated_bytes > rows - MIB
    (said,) = worst.limits
    assert "(the optimizer step): all of the elements concerned were taken to count" in said
