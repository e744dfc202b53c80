"""Trials side by side end as they do one by one, and nothing of them is left."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from dataclasses import replace
from subprocess import DEVNULL, Popen
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from memfit.devices.select import choose, describe
from memfit.errors import Interrupted
from memfit.question import worker_environment
from memfit.records import Split, TrialSpec, Verdict
from memfit.trial import pool as pools
from memfit.trial.pool import TrialPool
from memfit.trial.runner import Abandoned, TrialRunner
from memfit.units import MIB
from tests import sample
from tests.cli.terminal import WORKLOADS

if TYPE_CHECKING:
    from pathlib import Path

    from memfit.records import TrialResult

FITS = sample.cpu_trial(1, 1, MIB)


def spec(m: int, index: int = 1) -> TrialSpec:
    return replace(
        FITS.spec,
        index=index,
        reason=f"trial {index}",
        split=Split(microbatch=m, accumulation_steps=2),
    )


class Stub:
    """A runner whose trials end when they are told to."""

    def __init__(
        self, ends: dict[int, Any], ran: list[tuple[str, int]], name: str = "first"
    ) -> None:
        self.ends, self.ran, self.name = ends, ran, name
        self.tells = True
        self.closed = False
        self.abandoned = 0
        self._stop = threading.Event()
        self.other: Stub | None = None

    def run(self, asked: TrialSpec) -> TrialResult:
        m = asked.split.microbatch
        self.ran.append((self.name, m))
        end = self.ends.get(m, Verdict.FITS)
        if isinstance(end, threading.Event):
            while not end.wait(0.005):
                if self._stop.is_set():
                    raise Interrupted("interrupted")
            end = Verdict.FITS
        verdict = end.pop() if isinstance(end, list) else end
        return replace(FITS, spec=asked, verdict=verdict)

    def double(self) -> Stub:
        self.other = Stub(self.ends, self.ran, "second")
        return self.other

    def stop(self) -> None:
        self._stop.set()

    def go_on(self) -> None:
        self._stop.clear()

    def abandon(self) -> None:
        self.abandoned += 1
        self._stop.set()

    def take_up(self) -> None:
        self._stop.clear()

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    monkeypatch.setattr(pools, "cores", lambda: 2)
    return []


def begun(ran: list[tuple[str, int]], ends: dict[int, Any]) -> tuple[Stub, TrialPool]:
    """A pool whose first trial has ended, with nothing beside it."""
    stub = Stub(ends, ran)
    pool = TrialPool(stub, side_by_side=True)  # type: ignore[arg-type]
    pool.run(spec(1))
    return stub, pool


def test_a_foreseen_trial_has_run_by_the_time_it_is_asked_for(ran: list[tuple[str, int]]) -> None:
    asked = threading.Event()
    _, pool = begun(ran, {2: asked})
    with pool:
        threading.Timer(0.2, asked.set).start()
        pool.run(spec(2), lambda _: [spec(4, index=9)])
        result = pool.run(spec(4, index=3))

    assert sorted(ran) == [("first", 1), ("first", 2), ("second", 4)]
    assert result.spec == spec(4, index=3)


def test_what_became_unlikely_is_ended_and_its_side_goes_on(ran: list[tuple[str, int]]) -> None:
    first, second, never = threading.Event(), threading.Event(), threading.Event()
    stub, pool = begun(ran, {2: first, 3: second, 64: never})
    with pool:
        threading.Timer(0.1, first.set).start()
        pool.run(spec(2), lambda _: [spec(64)])
        threading.Timer(0.2, second.set).start()
        pool.run(spec(3), lambda _: [spec(4)])
        assert pool.run(spec(4)).spec == spec(4)

    assert stub.other is not None
    assert (stub.abandoned, stub.other.abandoned) == (0, 1)
    assert ran[2] == ("second", 64)
    assert ("second", 4) in ran


def test_what_is_foreseen_wrongly_changes_nothing(ran: list[tuple[str, int]]) -> None:
    asked, other = threading.Event(), threading.Event()
    stub, pool = begun(ran, {2: asked, 64: other})
    with pool:
        threading.Timer(0.2, asked.set).start()
        pool.run(spec(2), lambda _: [spec(64)])
        assert pool.run(spec(3)).spec == spec(3)

    assert sorted(ran[:3]) == [("first", 1), ("first", 2), ("second", 64)]
    assert ran[3:] == [("first", 3)]
    assert stub.other is not None
    assert stub.other.closed


@pytest.mark.parametrize(
    "verdict", [Verdict.HOST_OOM, Verdict.CRASH, Verdict.TIMEOUT, Verdict.ERROR]
)
def test_what_the_host_may_have_caused_is_run_again_alone(
    verdict: Verdict, ran: list[tuple[str, int]]
) -> None:
    asked = threading.Event()
    _, pool = begun(ran, {2: asked, 4: [Verdict.FITS, verdict]})
    with pool:
        threading.Timer(0.2, asked.set).start()
        pool.run(spec(2), lambda _: [spec(4)])

        assert pool.run(spec(4)).verdict is Verdict.FITS
        pool.run(spec(5), lambda _: [spec(6)])

    assert ("second", 4) in ran[1:3]  # the threads of both start together
    assert ran[3:] == [("first", 4), ("first", 5)]


def test_one_core_runs_one_trial_at_a_time(
    ran: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pools, "cores", lambda: 1)
    _, pool = begun(ran, {})
    with pool:
        pool.run(spec(2), lambda _: [spec(4)])

    assert ran == [("first", 1), ("first", 2)]


def test_an_interruption_ends_what_runs_ahead(ran: list[tuple[str, int]]) -> None:
    never = threading.Event()
    stub, pool = begun(ran, {2: never, 4: never})

    def foreseen(_ended: object) -> list[TrialSpec]:
        threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        return [spec(4)]

    with pytest.raises(KeyboardInterrupt), pool:
        pool.run(spec(2), foreseen)

    assert ("second", 4) in ran
    assert stub.other is not None
    assert stub.other.closed
    assert all("memfit-trial" not in thread.name for thread in threading.enumerate())


@pytest.fixture
def question(tmp_path: Path) -> tuple[TrialRunner, TrialSpec]:
    choice = choose("rtx-4090")
    device = describe(choice, memory_limit=None, headroom="0")
    asked = TrialSpec(
        index=1,
        purpose="search",
        split=Split(microbatch=1, accumulation_steps=2),
        group_microbatches=2,
        device=device,
        timeout_s=300,
    )
    environment = worker_environment(choice, device)
    return TrialRunner(str(WORKLOADS / "stack.py"), {}, environment=environment), asked


def figures(trial: TrialResult) -> list[Any]:
    return [replace(phase, seconds=0.0) for phase in trial.devices[0].phases]


@pytest.mark.parametrize("early", [False, True], ids=["while it runs", "before it runs"])
def test_a_real_trial_that_is_abandoned_leaves_the_nursery_for_the_next(
    early: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = tmp_path / "gate"
    gate.write_text("4:hang")
    monkeypatch.setenv("GATE", str(gate))
    runner = TrialRunner(str(WORKLOADS / "gated.py"), {}, environment={"CUDA_VISIBLE_DEVICES": ""})

    def abandon() -> None:
        while not early and not gate.with_suffix(".reached").exists():
            time.sleep(0.005)
        runner.abandon()

    with runner:
        runner.open()
        abandoning = threading.Thread(target=abandon)
        abandoning.start()
        if early:
            abandoning.join()
        with pytest.raises(Abandoned):
            runner.run(spec(4))
        abandoning.join()
        nurseries = psutil.Process().children()
        runner.take_up()
        after = runner.run(spec(1))

        assert psutil.Process().children() == nurseries
    assert after.verdict is Verdict.FITS


@pytest.mark.virtual
def test_real_trials_have_the_same_figures_side_by_side(
    question: tuple[TrialRunner, TrialSpec], ran: list[tuple[str, int]]
) -> None:
    del ran  # only for its two cores
    runner, asked = question
    specs = [
        replace(asked, index=m, split=Split(microbatch=m, accumulation_steps=2))
        for m in range(1, 6)
    ]
    with runner:
        runner.open()
        with TrialPool(runner, side_by_side=True) as pool:
            beside = [pool.run(s, lambda _: specs) for s in specs]
            processes = psutil.Process().children(recursive=True)
        alone = [runner.run(s) for s in specs]

    assert [t.spec for t in beside] == specs
    assert [figures(t) for t in beside] == [figures(t) for t in alone]
    assert {t.verdict for t in alone} == {Verdict.FITS}
    assert len(processes) >= 2
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert alive == []


@pytest.mark.virtual
def test_nothing_is_left_of_two_trials_when_memfit_is_killed(tmp_path: Path) -> None:
    words = ["probe", WORKLOADS / "stack.py", "--device", "rtx-4090", "--out", tmp_path / "out"]
    process = Popen(
        [sys.executable, "-m", "memfit", *map(str, words)], stdout=DEVNULL, stderr=DEVNULL
    )
    progress = tmp_path / "out/memfit.progress.json"
    children: list[psutil.Process] = []
    while process.poll() is None and len(children) < 3:  # two nurseries and a trial at the least
        children = psutil.Process(process.pid).children(recursive=True)
        time.sleep(0.01)
    process.kill()
    process.wait()

    _, alive = psutil.wait_procs(children, timeout=10)
    assert [p for p in alive if p.status() != psutil.STATUS_ZOMBIE] == []
    assert not progress.exists() or json.loads(progress.read_text())["trials"]


def test_the_second_trial_runs_beside_the_first(ran: list[tuple[str, int]]) -> None:
    first = threading.Event()
    with TrialPool(Stub({1: first}, ran), side_by_side=True) as pool:  # type: ignore[arg-type]
        threading.Timer(0.2, first.set).start()
        pool.run(spec(1), lambda _: [spec(2)])
        pool.run(spec(2))

    assert sorted(ran) == [("first", 1), ("second", 2)]
