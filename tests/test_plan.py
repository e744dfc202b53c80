"""The plan of a training run, from a probe's file."""

from __future__ import annotations

import subprocess
import sys
from collections import OrderedDict, UserDict, defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import memfit
from memfit.allocator import EXPANDABLE, NEW_VARIABLE, OLD_VARIABLE
from memfit.batch import candidates
from memfit.errors import UsageError
from memfit.plan import Plan, load
from memfit.records import Policy, Precision, ProbeResult, Split, Tuned, to_json
from tests import sample

if TYPE_CHECKING:
    from pathlib import Path


def plan_of(
    microbatch: int, steps: int, *, replicas: int = 1, logical_batch: int | None = None
) -> Plan:
    return Plan(
        split=Split(
            microbatch=microbatch,
            accumulation_steps=steps,
            replicas=replicas,
            logical_batch=logical_batch,
        )
    )


RAGGED = plan_of(22, 3, logical_batch=64)


class Pair(NamedTuple):
    inputs: Any
    labels: Any


def with_setting(result: ProbeResult) -> ProbeResult:
    return replace(result, spec=replace(result.spec, allocator=EXPANDABLE))


def test_a_plan_that_needs_a_setting_is_refused_without_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = Plan.of(with_setting(sample.gpt2()))
    for name in (OLD_VARIABLE, NEW_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UsageError, match="fits only with expandable_segments:True") as raised:
        plan.check(world_size=1)
    variable = plan.allocator_variable
    assert raised.value.hint == f"export {variable}={EXPANDABLE} before training starts"


@pytest.mark.parametrize("name", [OLD_VARIABLE, NEW_VARIABLE])
def test_a_plan_that_needs_a_setting_is_taken_with_it(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.delenv(NEW_VARIABLE, raising=False)
    monkeypatch.setenv(name, "max_split_size_mb:64, expandable_segments:true")
    Plan.of(with_setting(sample.gpt2())).check(world_size=1)


def test_the_larger_split_of_another_setting_is_taken_when_it_is_asked_for() -> None:
    split = Split(microbatch=24, accumulation_steps=20, logical_batch=480)
    tuned = Tuned(allocator=EXPANDABLE, variable=NEW_VARIABLE, trials=1, split=split)
    result = replace(sample.gpt2(), tuned=tuned)

    assert (Plan.of(result).microbatch, Plan.of(result).allocator) == (20, None)
    larger = Plan.of(result, tuned=True)
    assert (larger.microbatch, larger.allocator) == (24, EXPANDABLE)


def test_a_larger_split_that_was_not_found_is_refused() -> None:
    with pytest.raises(UsageError, match="found no larger microbatch"):
        Plan.of(sample.gpt2(), tuned=True)


def test_a_plan_is_loaded_from_a_probes_file(tmp_path: Path) -> None:
    result = sample.gpt2()
    path = tmp_path / "memfit.json"
    path.write_bytes(to_json(result))
    plan = memfit.load(path)
    assert plan == Plan.of(result) == load(str(path))
    assert plan.microbatch == result.split.microbatch
    assert plan.accumulation_steps == result.split.accumulation_steps
    assert plan.replicas == result.split.replicas
    assert plan.logical_batch == result.split.logical_batch
    assert plan.precision is result.spec.precision
    assert plan.clip_norm == result.spec.clip_norm


def test_what_cannot_be_loaded_is_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read .*absent.json: No such file") as raised:
        load(tmp_path / "absent.json")
    assert raised.value.hint == "`memfit probe` writes it"
    with pytest.raises(UsageError, match="cannot read"):
        load(tmp_path)
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(UsageError, match="not a memfit document"):
        load(tmp_path / "other.json")


def test_the_setting_is_checked() -> None:
    plan = plan_of(8, 4, replicas=2, logical_batch=64)
    plan.check(2)
    plan.check(world_size=2, logical_batch=64)
    with pytest.raises(UsageError, match="for 2 replicas, and this run has 4") as raised:
        plan.check(4)
    assert raised.value.hint == "probe again with --replicas 4"
    with pytest.raises(UsageError, match="logical batch is 64, and this run has 128") as raised:
        plan.check(2, logical_batch=128)
    assert raised.value.hint == "probe again with --replicas 2 and the logical batch 128"
    with pytest.raises(UsageError, match="logical batch is none, and this run has 8"):
        plan_of(8, 2).check(1, logical_batch=8)
    with pytest.raises(UsageError, match="for 1 replica, and this run has 2"):
        plan_of(8, 2).check(2)


def test_counts_of_full_and_of_last_groups() -> None:
    assert RAGGED.counts() == RAGGED.counts(64) == (22, 21, 21)
    assert RAGGED.counts(45) == (15, 15, 15)
    assert RAGGED.counts(44) == (22, 22)
    assert RAGGED.counts(23) == (12, 11)
    assert RAGGED.counts(1) == (1,)
    assert plan_of(4, 2).counts(10) == (4, 3, 3)


@given(share=st.integers(1, 400), examples=st.integers(1, 400), data=st.data())
def test_counts_cover_the_examples_in_the_fewest_microbatches(
    share: int, examples: int, data: st.DataObject
) -> None:
    sizes = candidates(
        logical_batch=share,
        replicas=1,
        policy=data.draw(st.sampled_from(Policy)),
        max_microbatch=None,
    )
    plan = Plan(split=sizes.split(data.draw(st.sampled_from(sizes.sizes))))
    assert plan.counts(share) == plan.counts()
    if examples <= share:
        counts = plan.counts(examples)
        assert sum(counts) == examples
        assert max(counts) <= plan.microbatch
        assert max(counts) - min(counts) <= 1
        assert len(counts) == -(-examples // plan.microbatch) <= plan.accumulation_steps


@pytest.mark.parametrize("examples", [0, -1])
def test_a_group_needs_examples(examples: int) -> None:
    with pytest.raises(UsageError, match="at least 1 example"):
        RAGGED.counts(examples)


def test_more_than_the_share_is_refused() -> None:
    plan = plan_of(8, 4, replicas=2, logical_batch=64)
    with pytest.raises(UsageError, match="is 32 examples, and got 64") as raised:
        plan.microbatches(np.zeros(64))
    assert raised.value.hint is not None
    assert "64 over 2" in raised.value.hint


def test_weights() -> None:
    assert RAGGED.weights() == pytest.approx((22 / 64, 21 / 64, 21 / 64))
    assert RAGGED.weights([512, 1536]) == (0.25, 0.75)
    plan = plan_of(8, 4, replicas=2, logical_batch=64)
    assert plan.weights() == (0.25,) * 4
    assert plan.weights([1, 1], total=4) == (0.5, 0.5)
    with pytest.raises(UsageError, match="need the elements of all"):
        plan.weights([1, 1])


def test_arrays_are_cut_along_their_first_dimension() -> None:
    batch = np.arange(128).reshape(64, 2)
    parts = list(RAGGED.microbatches(batch))
    assert [part.shape for part in parts] == [(22, 2), (21, 2), (21, 2)]
    assert np.array_equal(np.concatenate(parts), batch)


def test_tensors_are_cut_without_copies() -> None:
    torch = pytest.importorskip("torch")
    batch = {"x": torch.arange(64.0), "mask": torch.ones(64, 3, dtype=torch.bool)}
    parts = list(RAGGED.microbatches(batch))
    assert [(len(p["x"]), tuple(p["mask"].shape)) for p in parts] == [
        (22, (22, 3)),
        (21, (21, 3)),
        (21, (21, 3)),
    ]
    assert parts[0]["x"].data_ptr() == batch["x"].data_ptr()
    assert torch.equal(torch.cat([p["x"] for p in parts]), batch["x"])


def test_structures_keep_their_form() -> None:
    plan = plan_of(2, 2, logical_batch=4)
    x, y = np.arange(4), np.arange(4) * 10
    batch = {
        "pair": Pair(x, y),
        "list": [x, y],
        "tuple": (x, {"deep": y}, None),
        "names": ["a", "b", "c", "d"],
        "targets": [{"boxes": np.zeros((3, 4))}] * 4,
        "scale": 0.5,
        "zero": np.array(7),
        "word": "kept",
    }
    first, second = plan.microbatches(batch)
    assert isinstance(second["pair"], Pair)
    assert list(second["pair"].labels) == [20, 30]
    assert isinstance(second["list"], list)
    assert [list(part) for part in second["list"]] == [[2, 3], [20, 30]]
    assert isinstance(second["tuple"], tuple)
    assert list(second["tuple"][1]["deep"]) == [20, 30]
    assert second["tuple"][2] is None
    assert first["names"] + second["names"] == ["a", "b", "c", "d"]
    assert len(second["targets"]) == 2
    assert second["targets"][0]["boxes"].shape == (3, 4)
    assert (second["scale"], int(second["zero"]), second["word"]) == (0.5, 7, "kept")


@pytest.mark.parametrize("kind", [dict, OrderedDict, UserDict])
def test_mappings_keep_their_type(kind: type[Any]) -> None:
    first, _ = plan_of(2, 2, logical_batch=4).microbatches(kind({"x": np.arange(4)}))
    assert type(first) is kind
    assert list(first["x"]) == [0, 1]


def test_a_mapping_that_cannot_be_rebuilt_becomes_a_dictionary() -> None:
    batch: defaultdict[str, object] = defaultdict(int, x=np.arange(4))
    first, _ = plan_of(2, 2, logical_batch=4).microbatches(batch)
    assert type(first) is dict


def test_plain_sequences_are_one_item_per_example() -> None:
    plan = plan_of(2, 2, logical_batch=4)
    assert list(plan.microbatches(["a", "b", "c", "d"])) == [["a", "b"], ["c", "d"]]
    assert list(plan.microbatches((1, 2, 3))) == [(1, 2), (3,)]
    assert list(plan.microbatches([[1], [2, 3], [4]])) == [[[1], [2, 3]], [[4]]]
    assert list(plan.microbatches(range(3))) == [range(2), range(2, 3)]


def test_parts_have_to_agree() -> None:
    with pytest.raises(UsageError, match="disagree on the number of examples: 3 and 4"):
        RAGGED.microbatches((np.zeros(4), np.zeros(3)))


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (7, "nothing to cut"),
        ({}, "nothing to cut"),
        (np.array(1), "nothing to cut"),
        ({"x": object()}, "cannot cut a object"),
        ({"x": {1, 2}}, "cannot cut a set"),
        (np.zeros((0, 3)), "at least 1 example"),
    ],
)
def test_what_cannot_be_cut_is_told(batch: object, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        RAGGED.microbatches(batch)


def test_a_plan_keeps_precision_and_clipping() -> None:
    result = sample.gpt2()
    spec = replace(result.spec, precision=Precision.FP16, clip_norm=0.5)
    plan = Plan.of(replace(result, spec=spec))
    assert (plan.precision, plan.clip_norm) == (Precision.FP16, 0.5)


def test_loading_a_plan_imports_no_torch() -> None:
    code = "import sys, memfit.plan, memfit.search; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
