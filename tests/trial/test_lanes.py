"""A nursery that serves one probe after another, on one card and then on another."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from memfit import virtual
from memfit.devices.select import choose, describe
from memfit.errors import Interrupted, UsageError
from memfit.records import DeviceKind, DeviceSpec, Split, TrialSpec, Verdict
from memfit.trial.lane import Lane
from memfit.trial.runner import TrialRunner
from tests import sample
from tests.cli.terminal import WORKLOADS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

HOST = {"CUDA_VISIBLE_DEVICES": ""}


def runner(
    lane: Lane | None,
    target: object = WORKLOADS / "planned.py",
    environment: dict[str, str] | None = None,
    **parameters: str,
) -> TrialRunner:
    return TrialRunner(
        str(target),
        parameters,
        environment=HOST if environment is None else environment,
        load_timeout_s=300,
        lane=lane,
    )


def spec(device: DeviceSpec = sample.CPU, m: int = 1) -> TrialSpec:
    return TrialSpec(
        index=1,
        purpose="search",
        split=Split(microbatch=m, accumulation_steps=2),
        group_microbatches=2,
        device=device,
        timeout_s=300,
    )


@contextlib.contextmanager
def opened(stop: threading.Event | None = None) -> Iterator[Lane]:
    lane = Lane(stop)
    try:
        yield lane
    finally:
        lane.close()


def pid(made: TrialRunner) -> int:
    assert made._nursery is not None
    return made._nursery.pid


def test_the_next_runner_takes_the_nursery_with_other_parameters() -> None:
    with opened() as lane:
        with runner(lane, width="8") as first:
            one = first.open().workload.parameters["width"], pid(first)
            assert first.run(spec()).verdict is Verdict.FITS
        with runner(lane, width="6000") as second:
            other = second.open().workload.parameters["width"], pid(second)
            failed = second.run(spec())
        with runner(lane, wide="8") as third, pytest.raises(UsageError, match="'wide'"):
            third.open()

    assert (one[0], other[0]) == (8, 6000)
    assert one[1] == other[1]
    assert failed.evidence.text == "ValueError: 6000 is too wide"


class Waiting:
    """Stands in for a nursery that waits."""

    ended = False

    def kill(self) -> None:
        self.ended = True


@pytest.mark.parametrize(
    ("target", "environment", "serves"),
    [
        ("work.py", {"A": "1", "MEMFIT_VGPU_CARD": "another"}, True),
        ("work.py", {"A": "2", "MEMFIT_VGPU_CARD": "one"}, False),
        ("work.py", {"MEMFIT_VGPU_CARD": "one"}, False),
        ("other.py", {"A": "1", "MEMFIT_VGPU_CARD": "one"}, False),
    ],
)
def test_a_nursery_serves_the_same_target_in_the_same_environment_but_for_the_card(
    target: str, environment: dict[str, str], serves: bool
) -> None:
    nursery: Any = Waiting()
    lane = Lane()
    lane.keep("work.py", {"A": "1", "MEMFIT_VGPU_CARD": "one"}, nursery)

    assert lane.take(target, environment) is (nursery if serves else None)
    assert nursery.ended is not serves
    assert lane.take("work.py", {"A": "1"}) is None


def test_a_lane_that_is_stopped_ends_its_trial_and_says_nothing_of_its_size(
    tmp_path: Path,
) -> None:
    stop, gate = threading.Event(), tmp_path / "gate"
    gate.write_text("8:1")
    reached = gate.with_suffix(".reached")

    def pull() -> None:
        while not reached.exists():
            time.sleep(0.01)
        stop.set()

    environment = {**HOST, "GATE": str(gate)}
    with opened(stop) as lane, runner(lane, environment=environment, width="8") as made:
        made.open()
        threading.Thread(target=pull, daemon=True).start()
        with pytest.raises(Interrupted):
            made.run(spec())
        assert made._nursery is None


@pytest.mark.virtual
class TestVirtualCards:
    def trial(self, lane: Lane | None, card: str, target: object = WORKLOADS / "planned.py") -> Any:
        choice = choose(card)
        device = describe(choice, memory_limit=None)
        assert choice.card is not None
        assert device.kind is DeviceKind.VIRTUAL
        environment = virtual.prepare(choice.card, total_bytes=device.limit_bytes)
        with runner(lane, target, environment) as made:
            ready = made.open()
            memory = dataclasses.asdict(made.run(spec(device, 8)).devices[0])
            for phase in memory["phases"]:
                del phase["seconds"]
            return pid(made), memory, ready.environment

    def test_one_nursery_serves_cards_that_differ_with_the_bytes_of_each(self) -> None:
        with opened() as lane:
            found = {card: self.trial(lane, card) for card in ("t4", "h100-80gb", "rtx-4090")}
        alone = {card: self.trial(None, card) for card in ("t4", "h100-80gb")}

        assert len({pid for pid, _, _ in found.values()}) == 1
        for card, (_, memory, environment) in alone.items():
            assert (memory, environment) == found[card][1:]
        used = {memory["device_used_bytes"] for _, memory, _ in found.values()}
        assert len(used) == 3  # their contexts differ

    def test_a_module_that_looks_at_its_card_gets_a_nursery_for_each(self, tmp_path: Path) -> None:
        text = (WORKLOADS / "planned.py").read_text()
        target = tmp_path / "looks.py"
        target.write_text(text + "\nassert torch.cuda.is_available()\n")
        with opened() as lane:
            found = [self.trial(lane, card, target) for card in ("t4", "t4", "h100-80gb")]
        alone = self.trial(None, "h100-80gb", target)

        assert found[0][0] == found[1][0] != found[2][0]
        assert found[2][1] == alone[1]
