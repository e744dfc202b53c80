"""Real pressure: the allocator's own failures where training meets them, under every setting.

Nothing is made up here. A workload is measured with room to spare; then the device is made as
small as will let it reach the phase that is meant, and no further.
"""

import contextlib
from pathlib import Path

import pytest

from memfit import virtual
from memfit.devices.memory import least_request
from memfit.records import DeviceKind, DeviceSpec, Split, TrialSpec, Verdict
from memfit.trial.runner import TrialRunner
from memfit.units import GIB, MIB

pytestmark = pytest.mark.virtual
WORKLOADS = Path(__file__).parents[1] / "workloads"
CARD = virtual.find_card("rtx-3090")
CONTEXT = virtual.context_charge(CARD)[0]
SETTINGS = {
    "default": "",
    "expandable": "expandable_segments:True",
    "split": "max_split_size_mb:64",
    "collect": "garbage_collection_threshold:0.6",
    "rounded": "roundup_power2_divisions:4",
    "together": "max_split_size_mb:128,garbage_collection_threshold:0.8",
}
WIDE = 4096
"""Width at which the parameters take 256 MiB, so that blocks of the allocator matter little."""
FEW = 1
"""Microbatch whose activations are nothing beside the parameters."""
MANY = 256
"""Microbatch whose activations take twice what the parameters do."""


def device(limit, kind=DeviceKind.VIRTUAL):
    return DeviceSpec(
        kind=kind,
        slug=CARD.slug,
        name=CARD.name,
        total_bytes=CARD.total_bytes,
        limit_bytes=limit,
        context_bytes=CONTEXT,
    )


class Pressed:
    """Trials of one workload under one setting, on a device of any size."""

    def __init__(self, runner):
        self.runner = runner

    def run(self, m, limit, kind=DeviceKind.VIRTUAL):
        return self.runner.run(
            TrialSpec(
                index=1,
                purpose="search",
                split=Split(microbatch=m, accumulation_steps=2),
                group_microbatches=2,
                device=device(limit, kind),
                timeout_s=120.0,
            )
        )

    def needs(self, m):
        """Peak allocated of each phase where there is room to spare."""
        result = self.run(m, 20 * GIB)
        assert result.verdict is Verdict.FITS
        return {(p.phase, p.groups): p.peak_allocated_bytes for p in result.devices[0].phases}


@pytest.fixture(scope="module")
def pressed():
    """Open a runner for each setting and width once it is needed."""
    made = {}
    with contextlib.ExitStack() as stack:

        def under(setting, width=WIDE):
            if (setting, width) not in made:
                environment = virtual.prepare(CARD, total_bytes=CARD.total_bytes)
                if SETTINGS[setting]:
                    name = "PYTORCH_ALLOC_CONF"
                    environment |= dict.fromkeys(
                        (name, "PYTORCH_CUDA_ALLOC_CONF"), SETTINGS[setting]
                    )
                runner = stack.enter_context(
                    TrialRunner(
                        str(WORKLOADS / "stack.py"),
                        {"width": width},
                        environment=environment,
                        load_timeout_s=300,
                    )
                )
                runner.open()
                made[setting, width] = Pressed(runner)
            return made[setting, width]

        yield under


def ended(result):
    return result.verdict, result.evidence.phase, result.evidence.group


KINDS = [DeviceKind.VIRTUAL, DeviceKind.CUDA]
EVERY = [("default", kind) for kind in KINDS] + [
    (setting, DeviceKind.VIRTUAL) for setting in SETTINGS if setting != "default"
]


def between(lower, upper):
    """Choose a size of the device that lets it reach `lower` and not `upper`."""
    assert upper - lower > 100 * MIB
    return CONTEXT + lower + (upper - lower) * 3 // 4


@pytest.mark.parametrize(("setting", "kind"), EVERY)
def test_forward_can_be_what_does_not_fit(pressed, setting, kind):
    bench = pressed(setting)
    needs = bench.needs(4 * MANY)
    limit = between(needs["build", "none"], needs["forward", "first"])

    result = bench.run(4 * MANY, limit, kind)

    assert ended(result) == (Verdict.OOM, "forward", 1)
    assert result.evidence.rule == "torch.OutOfMemoryError"
    assert not result.evidence.doubtful


@pytest.mark.parametrize(("setting", "kind"), EVERY)
def test_backward_can_be_what_does_not_fit(pressed, setting, kind):
    bench = pressed(setting)
    needs = bench.needs(FEW)
    limit = between(needs["build", "none"], needs["backward", "first"])

    assert ended(bench.run(FEW, limit, kind)) == (Verdict.OOM, "backward", 1)


@pytest.mark.parametrize(("setting", "kind"), EVERY)
def test_the_first_optimizer_step_can_be_what_does_not_fit(pressed, setting, kind):
    bench = pressed(setting)
    needs = bench.needs(FEW)
    limit = between(needs["backward", "first"], needs["optimizer_step", "first"])

    assert ended(bench.run(FEW, limit, kind)) == (Verdict.OOM, "optimizer_step", 1)


@pytest.mark.parametrize(("setting", "kind"), EVERY)
def test_the_second_group_alone_can_be_what_does_not_fit(pressed, setting, kind):
    bench = pressed(setting)
    needs = bench.needs(MANY)
    first = max(size for (_, groups), size in needs.items() if groups != "later")
    later = max(size for (_, groups), size in needs.items() if groups == "later")

    result = bench.run(MANY, between(first, later), kind)

    assert result.verdict is Verdict.OOM
    assert result.evidence.group == 2
    assert result.optimizer_steps_applied == 1


@pytest.mark.parametrize("kind", KINDS)
def test_the_workspace_of_cublas_can_be_what_does_not_fit(pressed, kind):
    bench = pressed("default", width=64)
    limit = CONTEXT + 10 * MIB  # a segment of 2 MiB holds everything but the workspace

    result = bench.run(FEW, limit, kind)

    assert ended(result) == (Verdict.OOM, "forward", 1)
    assert result.devices[0].peak_reserved_bytes == 2 * MIB
    # Up to torch 2.7, cuBLASLt has 1 MiB of its own beside the workspace of cuBLAS.
    assert result.devices[0].peak_allocated_bytes < 2 * MIB
    assert result.demand_bytes - (result.devices[0].outside_allocator_bytes or 0) < 3 * MIB
    # Alone it takes a segment of 20 MiB, and everything fits once there is room for that.
    assert bench.run(FEW, CONTEXT + 2 * MIB + 20 * MIB, kind).verdict is Verdict.FITS


@pytest.mark.parametrize(
    ("segment", "least"),
    [
        (2 * MIB, 512),
        (20 * MIB, MIB + 512),
        (12 * MIB, 10 * MIB + 512),
        (GIB, GIB - 2 * MIB + 512),
    ],
)
def test_a_refused_segment_tells_the_least_that_was_asked_for(segment, least):
    assert least_request(segment) == least


def test_a_device_that_has_just_enough_room_is_not_refused(pressed):
    bench = pressed("default")
    whole = bench.run(MANY, 20 * GIB)

    assert bench.run(MANY, whole.peak_bytes).verdict is Verdict.FITS


@pytest.mark.parametrize("kind", KINDS)
def test_what_fails_says_how_much_was_needed_and_what_was_left(pressed, kind):
    bench = pressed("default")
    limit = CONTEXT + GIB
    result = bench.run(4 * MANY, limit, kind)

    assert result.verdict is Verdict.OOM
    assert 0 <= result.evidence.free_bytes < limit
    assert "were needed" in result.evidence.text
    assert result.devices[0].peak_reserved_bytes <= limit - CONTEXT
