"""Stored documents: what is written is read again, and what is not ours is refused."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from memfit import records
from memfit.errors import UsageError
from memfit.records import (
    SCHEMA_VERSION,
    Composition,
    DeviceMemory,
    Evidence,
    ProbeProgress,
    ProbeResult,
    Split,
    TrialResult,
    TrialSpec,
    Verdict,
    from_json,
    to_json,
)
from tests import sample

ANSWERS = [sample.gpt2, sample.on_cpu, sample.with_hole]


def document(**changes: Any) -> bytes:
    stored = json.loads(to_json(sample.gpt2()))
    return json.dumps({**stored, **changes}).encode()


def refused(data: bytes) -> UsageError:
    with pytest.raises(UsageError) as caught:
        from_json(data, ProbeResult, origin="memfit.json")
    assert "memfit.json" in caught.value.message
    return caught.value


@pytest.mark.parametrize("make", ANSWERS)
def test_a_stored_answer_is_read_again_as_it_was(make: Any) -> None:
    assert from_json(to_json(make()), ProbeResult, origin="memfit.json") == make()


def test_a_document_is_text_for_people_and_ends_its_last_line() -> None:
    text = to_json(sample.gpt2()).decode()

    assert text.startswith('{\n  "schema": "memfit.probe",\n  "schema_version": 1,\n')
    assert text.endswith("}\n")


def test_the_same_answer_is_stored_as_the_same_bytes() -> None:
    assert to_json(sample.gpt2()) == to_json(sample.gpt2())


def test_what_was_not_measured_is_stored_as_null() -> None:
    stored = json.loads(to_json(sample.on_cpu()))
    assert stored["trials"][0]["devices"][0]["peak_allocated_bytes"] is None


def test_keys_that_are_not_known_are_ignored() -> None:
    assert from_json(document(later=1), ProbeResult, origin="") == sample.gpt2()


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "is not a memfit document"),
        (b"junk", "is not a memfit document"),
        (b"\xff\xfe\x00", "is not a memfit document"),
        (b"[1]", "is not a memfit document"),
        (b'{"a": 1}', "is not a memfit document"),
        (to_json(sample.gpt2())[:-200], "is not a memfit document"),
        (document(schema="memfit.progress"), "holds 'memfit.progress', not 'memfit.probe'"),
        (document(schema="other"), "holds 'other', not 'memfit.probe'"),
        (b'{"schema": "memfit.probe", "schema_version": 1}', "is damaged"),
        (document(split="none"), "is damaged"),
        (document(source="guessed"), "is damaged"),
    ],
)
def test_what_is_no_answer_is_refused_with_the_reason(data: bytes, said: str) -> None:
    assert said in refused(data).message


def test_a_newer_document_is_refused_with_both_versions() -> None:
    error = refused(document(schema_version=SCHEMA_VERSION + 1))

    assert f"schema version {SCHEMA_VERSION + 1}" in error.message
    assert f"up to {SCHEMA_VERSION}" in error.message
    assert error.hint == "update memfit"


def test_an_answer_is_no_unfinished_probe() -> None:
    with pytest.raises(UsageError, match=r"holds 'memfit.probe', not 'memfit.progress'"):
        from_json(to_json(sample.gpt2()), ProbeProgress, origin="memfit.progress.json")


@pytest.mark.parametrize(
    "record", [r for r in vars(records).values() if dataclasses.is_dataclass(r)]
)
def test_records_cannot_be_changed(record: Any) -> None:
    assert record.__dataclass_params__.frozen


@pytest.mark.parametrize(
    ("logical", "replicas", "steps", "sizes"),
    [
        (480, 1, 24, (20,) * 24),
        (64, 1, 3, (22, 21, 21)),
        (12, 2, 2, (3, 3)),
        (14, 2, 3, (3, 2, 2)),
        (5, 1, 1, (5,)),
    ],
)
def test_the_sizes_of_a_group_sum_to_its_share_of_the_logical_batch(
    logical: int, replicas: int, steps: int, sizes: tuple[int, ...]
) -> None:
    split = Split(
        microbatch=sizes[0], accumulation_steps=steps, replicas=replicas, logical_batch=logical
    )

    assert split.sizes == sizes
    assert sum(split.sizes) * replicas == logical


def test_without_a_logical_batch_all_microbatches_are_equal() -> None:
    assert Split(microbatch=7, accumulation_steps=2).sizes == (7, 7)


def spec(**changes: Any) -> TrialSpec:
    fields: dict[str, Any] = {
        "index": 1,
        "purpose": "search",
        "split": Split(microbatch=22, accumulation_steps=3, logical_batch=64),
        "group_microbatches": 2,
        "device": sample.CPU,
    }
    return TrialSpec(**{**fields, **changes})


@pytest.mark.parametrize(
    ("run", "sizes", "full"),
    [(1, (21,), False), (2, (22, 21), False), (3, (22, 21, 21), True), (9, (22, 21, 21), True)],
)
def test_a_shortened_group_keeps_one_of_each_size(
    run: int, sizes: tuple[int, ...], *, full: bool
) -> None:
    made = spec(group_microbatches=run)

    assert made.sizes == sizes
    assert made.runs_full_groups is full


def device(**changes: int | None) -> DeviceMemory:
    fields: dict[str, Any] = {field.name: None for field in dataclasses.fields(DeviceMemory)}
    return DeviceMemory(**{**fields, "rank": 0, "device": 0, "phases": (), **changes})


@pytest.mark.parametrize(
    ("memory", "peak"),
    [
        (device(peak_reserved_bytes=5, outside_allocator_bytes=3, device_used_bytes=99), 8),
        (device(peak_reserved_bytes=5), 5),
        (device(device_used_bytes=99), 99),
        (device(), None),
    ],
)
def test_the_peak_is_what_is_compared_with_the_limit(
    memory: DeviceMemory, peak: int | None
) -> None:
    assert memory.peak_bytes == peak


def test_a_trials_peak_is_that_of_its_most_loaded_device() -> None:
    trial = TrialResult(
        spec=spec(),
        verdict=Verdict.FITS,
        evidence=Evidence(rule="all groups ran", text=""),
        devices=(device(device_used_bytes=3), device(device_used_bytes=9), device()),
    )

    assert trial.peak_bytes == 9
    assert trial.peak_allocated_bytes is None


def test_the_parts_of_a_composition_sum_to_its_total() -> None:
    made = Composition(
        phase="backward",
        parameters_bytes=1,
        buffers_bytes=2,
        gradients_bytes=4,
        optimizer_state_bytes=8,
        activations_bytes=16,
        baseline_bytes=32,
    )

    assert made.total_bytes == 63
    assert made.dominant == "the process before the workload"
    assert dataclasses.replace(made, baseline_bytes=0).dominant == "activations and temporaries"


@pytest.mark.parametrize(
    ("verdict", "limits"),
    [
        (Verdict.FITS, False),
        (Verdict.OOM, True),
        (Verdict.HOST_OOM, True),
        (Verdict.THRASH, True),
        (Verdict.SIZE_LIMIT, True),
        (Verdict.TIMEOUT, False),
        (Verdict.ERROR, False),
        (Verdict.CRASH, False),
    ],
)
def test_only_a_lack_of_room_says_something_about_the_size(
    verdict: Verdict, *, limits: bool
) -> None:
    assert verdict.limits_size is limits
