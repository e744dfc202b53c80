"""Trials on a virtual GPU: real allocator, real out-of-memory errors, the same bytes every time."""

import contextlib
import dataclasses
from pathlib import Path

import pytest

from memfit import virtual
from memfit.allocator import EXPANDABLE
from memfit.records import DeviceKind, DeviceSpec, Precision, Split, TrialSpec, Verdict
from memfit.trial.runner import TrialRunner
from memfit.units import GIB, MIB

pytestmark = pytest.mark.virtual
WORKLOADS = Path(__file__).parents[1] / "workloads"
CARD = virtual.find_card("rtx-3090")


def device(limit=2 * GIB, kind=DeviceKind.VIRTUAL):
    return DeviceSpec(
        kind=kind,
        slug=CARD.slug,
        name=CARD.name,
        total_bytes=CARD.total_bytes,
        limit_bytes=limit,
        context_bytes=virtual.context_charge(CARD)[0],
    )


def spec(**changes):
    fields = {
        "index": 1,
        "purpose": "search",
        "split": Split(microbatch=4, accumulation_steps=2),
        "group_microbatches": 2,
        "device": device(),
        "timeout_s": 120.0,
    }
    return TrialSpec(**{**fields, **changes})


@contextlib.contextmanager
def opened(environment=None, target="stack.py", **parameters):
    environment = virtual.prepare(CARD, total_bytes=CARD.total_bytes) | (environment or {})
    with TrialRunner(
        str(WORKLOADS / target), parameters, environment=environment, load_timeout_s=300
    ) as runner:
        runner.open()
        yield runner


@pytest.fixture(scope="module")
def runner():
    with opened() as made:
        yield made


def phases(result):
    return {(p.phase, p.groups): p for p in result.devices[0].phases}


def bytes_of(result):
    memory = dataclasses.asdict(result.devices[0])
    for phase in memory["phases"]:
        del phase["seconds"]
    return memory


def test_a_trial_reports_every_phase_of_first_and_later_groups(runner):
    found = phases(runner.run(spec()))

    assert set(found) == {
        ("build", "none"),
        ("forward", "first"),
        ("backward", "first"),
        ("optimizer_step", "first"),
        ("forward", "later"),
        ("backward", "later"),
        ("optimizer_step", "later"),
    }
    assert all(p.peak_allocated_bytes for p in found.values())


def test_later_groups_hold_the_optimizer_state_that_the_first_step_made(runner):
    found = phases(runner.run(spec()))
    made = runner.run(spec()).composition.optimizer_state_bytes
    grown = (
        found["forward", "later"].peak_allocated_bytes
        - found["forward", "first"].peak_allocated_bytes
    )

    assert made > 0
    assert grown >= made


def test_the_parts_of_the_peak_sum_to_it(runner):
    result = runner.run(spec())

    assert result.composition.total_bytes == result.peak_allocated_bytes
    # Two moments of each of the parameters; the step counters stay on the host.
    assert result.composition.optimizer_state_bytes == 2 * result.composition.parameters_bytes
    assert result.composition.gradients_bytes == result.composition.parameters_bytes


def test_the_context_lies_outside_the_allocator(runner):
    memory = runner.run(spec()).devices[0]

    assert memory.device_used_source == "nvml"
    assert memory.outside_allocator_bytes == pytest.approx(device().context_bytes, abs=2 * MIB)
    assert memory.device_used_bytes == memory.peak_reserved_bytes + memory.outside_allocator_bytes


def test_the_same_trial_gives_the_same_bytes_every_time(runner):
    results = [
        bytes_of(runner.run(spec(split=Split(microbatch=m, accumulation_steps=2))))
        for m in (64, 8, 64, 64)
    ]

    assert results[0] == results[2] == results[3]


def test_recording_the_timeline_changes_no_peak(runner):
    plain = runner.run(spec())
    recorded = runner.run(spec(record_timeline=True))

    assert bytes_of(plain) == bytes_of(recorded)
    assert recorded.timeline is not None
    top = max(point.allocated_bytes for point in recorded.timeline.points)
    assert top == pytest.approx(recorded.peak_allocated_bytes, rel=0.02)
    assert [p.phase for p in recorded.timeline.phases] == [
        "forward",
        "backward",
        "forward",
        "backward",
        "optimizer_step",
    ]


@pytest.mark.parametrize(
    ("microbatch", "limit", "phase", "group"),
    [
        (1, virtual.context_charge(CARD)[0] + 256, "build", None),
        (4096, 700 * MIB, "forward", 1),
    ],
)
def test_the_allocator_runs_out_of_memory_in_the_phase_that_is_said(
    runner, microbatch, limit, phase, group
):
    result = runner.run(
        spec(split=Split(microbatch=microbatch, accumulation_steps=2), device=device(limit))
    )

    assert result.verdict is Verdict.OOM
    assert result.evidence.rule == "torch.OutOfMemoryError"
    assert (result.evidence.phase, result.evidence.group) == (phase, group)
    assert result.demand_bytes > limit


def test_the_first_optimizer_step_can_be_what_does_not_fit():
    with opened(width=2048) as runner:
        needed = runner.run(spec(device=device(8 * GIB)))
        state = needed.composition.optimizer_state_bytes
        limit = needed.peak_bytes - state // 2
        result = runner.run(spec(device=device(limit)))

    assert needed.verdict is Verdict.FITS
    assert result.verdict is Verdict.OOM
    assert (result.evidence.phase, result.evidence.group) == ("optimizer_step", 1)


def test_gradients_are_resident_from_the_second_microbatch_on(runner):
    one = runner.run(spec(split=Split(microbatch=4, accumulation_steps=1), group_microbatches=1))
    two = runner.run(spec())
    gradients = two.composition.gradients_bytes
    grown = (
        phases(two)["forward", "later"].peak_allocated_bytes
        - phases(one)["forward", "later"].peak_allocated_bytes
    )

    assert grown == pytest.approx(gradients, rel=0.01)


@pytest.mark.parametrize("precision", list(Precision))
def test_every_precision_trains(runner, precision):
    result = runner.run(spec(precision=precision, clip_norm=1.0))

    assert result.verdict is Verdict.FITS
    assert result.optimizer_steps_applied == result.optimizer_steps_attempted == 2


def test_replicas_add_the_buckets_of_their_wrapper(runner):
    alone = runner.run(spec())
    four = runner.run(spec(split=Split(microbatch=4, accumulation_steps=2, replicas=4)))
    gradients = alone.composition.gradients_bytes

    assert four.verdict is Verdict.FITS
    # DistributedDataParallel keeps a second copy of every gradient in its buckets.
    assert four.peak_allocated_bytes - alone.peak_allocated_bytes == pytest.approx(
        gradients, rel=0.02
    )


def test_a_real_device_is_limited_through_the_allocator(runner):
    limit = 700 * MIB
    small = runner.run(spec(device=device(limit, DeviceKind.CUDA)))
    large = runner.run(
        spec(
            split=Split(microbatch=4096, accumulation_steps=2),
            device=device(limit, DeviceKind.CUDA),
        )
    )

    assert small.verdict is Verdict.FITS
    assert large.verdict is Verdict.OOM
    assert large.devices[0].peak_reserved_bytes <= limit


def test_a_setting_of_a_trial_gives_the_bytes_that_the_environment_would():
    sizes = Split(microbatch=300, accumulation_steps=2)
    present = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}
    both = {"PYTORCH_CUDA_ALLOC_CONF": f"max_split_size_mb:64,{EXPANDABLE}"}
    with (
        opened(environment=present, width=1024) as added,
        opened(environment=both, width=1024) as given,
    ):
        plain = added.run(spec(split=sizes))
        set_by_the_trial = added.run(spec(split=sizes, allocator=EXPANDABLE))
        set_by_the_environment = given.run(spec(split=sizes))

    assert bytes_of(set_by_the_trial) == bytes_of(set_by_the_environment)
    assert bytes_of(set_by_the_trial) != bytes_of(plain)


def test_what_cudnn_opens_is_opened_once_in_the_nursery_and_changes_no_byte():
    environment = virtual.prepare(CARD, total_bytes=CARD.total_bytes)
    convolutions = str(WORKLOADS.parents[1] / "examples" / "resnet50.py")
    with TrialRunner(
        convolutions, {"image": "32"}, environment=environment, load_timeout_s=300
    ) as runner:
        runner.open()
        assert runner._nursery is not None
        maps = Path(f"/proc/{runner._nursery.pid}/maps")
        before = maps.read_text()
        first, second = runner.run(spec()), runner.run(spec())
        after = maps.read_text()

    assert "libcudnn_engines" not in before
    if not any("not plan for a device" in limit for limit in first.limits):
        assert "libcudnn_engines" in after
    assert first.verdict is Verdict.FITS
    assert bytes_of(first) == bytes_of(second)


@pytest.mark.parametrize("uses", ["a kernel", "fake tensors", "a module"])
def test_what_is_imported_only_once_it_is_asked_for_changes_no_byte(uses):
    with opened(target="meta.py") as runner:
        without = runner.run(spec())
    with opened(target="meta.py", uses=uses) as runner:
        ended = [runner.run(spec()), runner.run(spec())]

    assert [trial.verdict for trial in ended] == [Verdict.FITS, Verdict.FITS]
    assert [bytes_of(trial) for trial in ended] == [bytes_of(without), bytes_of(without)]


def test_a_module_that_computes_on_the_meta_device_is_imported(tmp_path):
    target = tmp_path / "early.py"
    lines = "import torch\n\ntorch.zeros(3, device='meta').dot(torch.zeros(3, device='meta'))\n"
    target.write_text(lines + (WORKLOADS / "stack.py").read_text().replace("from __future__", "#"))
    environment = virtual.prepare(CARD, total_bytes=CARD.total_bytes)
    with TrialRunner(str(target), {}, environment=environment, load_timeout_s=300) as runner:
        runner.open()

        assert runner.run(spec()).verdict is Verdict.FITS
