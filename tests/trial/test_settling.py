"""More groups are run while the allocator has not come to rest."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any, cast

import pytest

from memfit import virtual
from memfit.devices.memory import Reading
from memfit.records import (
    DeviceKind,
    DeviceSpec,
    Parameter,
    Precision,
    Split,
    TrialSpec,
    Verdict,
)
from memfit.trial.runner import TrialRunner
from memfit.trial.settling import MORE_FOR_GROWTH, Settling
from memfit.units import GIB, MIB

LIMIT = 16 * GIB


@dataclass
class Device:
    """An allocator's counters."""

    reserved: int | None = 0
    taken: int | None = 0
    retries: int | None = 0

    def read(self, *, device_used: bool) -> Reading:
        nothing: dict[str, Any] = dict.fromkeys(Reading.__slots__)
        return Reading(
            **nothing
            | {
                "reserved_bytes": self.reserved,
                "taken_bytes": self.taken,
                "alloc_retries": self.retries,
                "outside_allocator_bytes": 0 if device_used else None,
                "allocator_events": 0,
            }
        )


def after_group(*, before: Device, after: Device) -> Settling:
    device = Device()
    settling = Settling(cast("Any", device), LIMIT)
    device.__dict__.update(before.__dict__)
    settling.begin_group()
    device.__dict__.update(after.__dict__)
    settling.end_group()
    return settling


@pytest.mark.parametrize(
    ("reserved", "took", "retries", "another"),
    [
        (8 * GIB, 0, 0, False),  # at rest
        (LIMIT - MIB, 0, 0, False),  # at rest, however little is left
        (8 * GIB, 512 * MIB, 0, False),  # it grows, and has room for more of that
        (13 * GIB, 512 * MIB, 0, True),  # a few more such groups would fill the device
        (LIMIT - 256 * MIB, 2 * MIB, 0, True),  # it grows little, but there is little
        (8 * GIB, 0, 1, True),  # it flushed its cache
    ],
)
def test_another_group_is_run_where_the_last_one_leaves_it_open(
    reserved: int, took: int, retries: int, another: bool
) -> None:
    settling = after_group(
        before=Device(reserved=reserved - took, taken=reserved, retries=3),
        after=Device(reserved=reserved, taken=reserved + took, retries=3 + retries),
    )
    assert settling.wants_another(0) is another
    assert settling.retries == retries


def test_an_allocator_that_never_rests_does_not_keep_a_trial_forever() -> None:
    settling = after_group(before=Device(), after=Device(reserved=LIMIT, taken=LIMIT))
    assert settling.wants_another(MORE_FOR_GROWTH - 1)
    assert not settling.wants_another(MORE_FOR_GROWTH)


def test_a_device_without_such_counters_needs_no_more_groups() -> None:
    nothing = Device(reserved=None, taken=None, retries=None)
    settling = after_group(before=nothing, after=nothing)
    assert not settling.wants_another(0)
    assert settling.retries is None


CARD = virtual.find_card("h100-80gb")
SHAPE: dict[str, Parameter] = {
    "kind": "transformer",
    "depth": 8,
    "width": 640,
    "length": 256,
    "checkpointed": True,
    "even": False,
    "update": "adamw fused",
}


@pytest.fixture(scope="module")
def runner():
    """A workload whose allocator takes another segment in the third group."""
    with contextlib.ExitStack() as stack:
        made = stack.enter_context(
            TrialRunner(
                "tests.benchmarks.workloads.drawn:Drawn",
                SHAPE,
                environment=virtual.prepare(CARD, total_bytes=CARD.total_bytes),
                load_timeout_s=300,
            )
        )
        made.open()
        yield made


@pytest.mark.virtual
@pytest.mark.parametrize("microbatch", [46, 47, 48])
def test_what_fits_fits_in_twelve_groups(runner: TrialRunner, microbatch: int) -> None:
    def run(groups: int) -> Verdict:
        spec = TrialSpec(
            index=microbatch,
            purpose="search",
            split=Split(microbatch=microbatch, accumulation_steps=2),
            group_microbatches=2,
            groups=groups,
            precision=Precision.BF16,
            device=DeviceSpec(
                kind=DeviceKind.VIRTUAL,
                slug=CARD.slug,
                name=CARD.name,
                total_bytes=CARD.total_bytes,
                limit_bytes=2104533976,
                context_bytes=virtual.context_charge(CARD)[0],
            ),
        )
        return runner.run(spec).verdict

    assert run(2) is run(12)
