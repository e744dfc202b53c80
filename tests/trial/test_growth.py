"""Memory that stays from group to group is named with the line that allocated it."""

from __future__ import annotations

import pytest

from memfit import virtual
from memfit.records import Split, Verdict
from memfit.steady import TRACED_GROUPS, judge, suspicious
from memfit.trial.runner import TrialRunner
from memfit.units import MIB
from tests.trial.test_virtual_trials import CARD, WORKLOADS, spec

pytestmark = pytest.mark.virtual
LEAKS = WORKLOADS / "leaks.py"


def place(text):
    """Name the only line of the workload that holds this text."""
    found = [n for n, code in enumerate(LEAKS.read_text().splitlines(), 1) if text in code]
    assert len(found) == 1
    return f"workloads/leaks.py:{found[0]}"


@pytest.fixture(scope="module")
def kind(tmp_path_factory):
    """The file that says what the workload keeps, read when a trial builds it."""
    return tmp_path_factory.mktemp("leaks") / "kind"


@pytest.fixture(scope="module")
def runner(kind):
    environment = virtual.prepare(CARD, total_bytes=CARD.total_bytes) | {"LEAK": str(kind)}
    with TrialRunner(str(LEAKS), {}, environment=environment, load_timeout_s=300) as made:
        made.open()
        yield made


@pytest.fixture
def look(runner, kind):
    def look(what, groups=3, **changes):
        kind.write_text(what)
        split = Split(microbatch=8, accumulation_steps=2)
        answer = runner.run(spec(split=split, groups=groups, **changes))
        assert answer.verdict is Verdict.FITS
        ends = answer.observed.allocated_after_groups_bytes
        assert len(ends) == answer.groups_run
        traced = None
        if suspicious(ends):
            again = spec(split=split, groups=TRACED_GROUPS, purpose="trace", index=2, **changes)
            traced = runner.run(again)
        return judge(answer, traced)

    return look


@pytest.mark.parametrize("what", ["none", "once"])
def test_a_clean_workload_is_not_accused(look, what):
    found = look(what)
    assert (found.verdict, found.reason, found.places) == ("steady", None, ())


def test_a_scaler_and_clipping_are_no_growth(look):
    assert look("none", precision="fp16", clip_norm=1.0).verdict == "steady"


@pytest.mark.parametrize("what", ["cache", "cycle"])
def test_what_fills_and_stops_and_what_the_collector_frees_is_no_growth(look, what):
    found = look(what)
    assert (found.verdict, found.reason) == ("steady", "it rose at first and then stopped")


def test_a_graph_that_is_kept_is_named_with_the_lines_of_its_forward(look):
    found = look("graph")
    activation = 8 * 256 * 4  # of one block, for one of the two microbatches of a group

    assert found.verdict == "growing"
    # relu keeps its result; linear keeps its input, which is the result before or the batch.
    assert place("return torch.relu(") in {p.where for p in found.places}
    assert place("return torch.randn(m") in {p.where for p in found.places}
    assert found.bytes_per_group == sum(p.bytes_per_group for p in found.places)
    assert found.bytes_per_group >= 2 * 4 * activation
    assert found.groups_until_limit is not None


def test_a_list_of_losses_is_named_with_its_line(look):
    found = look("losses")

    assert (found.verdict, found.bytes_per_group) == ("growing", 2 * 512)
    assert [p.where for p in found.places] == [place("loss = model(batch)")]


def test_a_cache_that_grows_is_named_with_its_line(look):
    found = look("growing cache")

    assert found.bytes_per_group == 2 * 3 * MIB
    assert found.places[0].where == place("always.append(")
    assert found.places[0].bytes_per_group == 2 * 3 * MIB


def test_growth_that_is_not_in_every_group_shows_over_more_of_them(look):
    found = look("now and then", groups=8)

    assert (found.verdict, found.bytes_per_group) == ("growing", MIB // 2)
    assert [p.where for p in found.places] == [place("sometimes.append(")]


def test_two_groups_are_too_few_to_tell(look):
    assert look("growing cache", groups=2).verdict == "unknown"
