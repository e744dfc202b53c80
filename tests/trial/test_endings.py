"""How trials end: real processes, real kills."""

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from memfit.records import DeviceKind, DeviceSpec, Split, TrialSpec, Verdict
from memfit.trial.runner import TrialRunner
from memfit.units import GIB

WORKLOADS = Path(__file__).parents[1] / "workloads"
CPU = DeviceSpec(
    kind=DeviceKind.CPU, slug="cpu", name="CPU", total_bytes=64 * GIB, limit_bytes=32 * GIB
)


def spec(**changes):
    fields = {
        "index": 1,
        "purpose": "search",
        "split": Split(microbatch=4, accumulation_steps=2),
        "group_microbatches": 2,
        "device": CPU,
        "timeout_s": 60.0,
    }
    return TrialSpec(**{**fields, **changes})


@pytest.fixture(scope="module")
def fault_file(tmp_path_factory):
    return tmp_path_factory.mktemp("fault") / "fault"


@pytest.fixture(scope="module")
def runner(fault_file):
    fault_file.write_text("none")
    environment = {"FAULT": str(fault_file), "CUDA_VISIBLE_DEVICES": ""}
    with TrialRunner(
        str(WORKLOADS / "faulty.py"), {}, environment=environment, load_timeout_s=120
    ) as made:
        made.open()
        yield made


@pytest.fixture
def run(runner, fault_file):
    def run(fault, **changes):
        fault_file.write_text(fault)
        return runner.run(spec(**changes))

    return run


def descendants():
    return [p for p in psutil.Process().children(recursive=True) if p.status() != "zombie"]


def test_a_trial_that_runs_all_its_groups_fits(run):
    result = run("none")

    assert result.verdict is Verdict.FITS
    assert (result.groups_run, result.optimizer_steps_applied) == (2, 2)


@pytest.mark.parametrize(
    ("fault", "phase"),
    [
        ("model:raise", "build"),
        ("optimizer:raise", "build"),
        ("batch:raise", "built"),
        ("loss:raise", "forward"),
        ("backward:raise", "backward"),
        ("step:raise", "optimizer_step"),
    ],
)
def test_an_exception_is_the_users_error_with_its_phase_and_traceback(run, fault, phase):
    result = run(fault)

    assert result.verdict is Verdict.ERROR
    assert result.evidence.phase == phase
    assert "raised in" in result.evidence.text
    assert "faulty.py" in result.evidence.traceback
    assert "memfit/trial" not in result.evidence.traceback


@pytest.mark.parametrize(
    ("fault", "rule", "words"),
    [
        ("model:not-a-module", "contract", "model() returned str"),
        ("model:frozen", "contract", "no parameter that needs a gradient"),
        ("model:unused", "gradient missing", "unused.weight"),
        ("batch:size", "contract", "batch(4) returned tensors of shape (5, 8)"),
        ("batch:long-list", "contract", "batch(4) returned tensors of shape (3, 8)"),
        ("loss:vector", "contract", "shape (4, 8), not a scalar"),
        ("loss:float", "contract", "loss() returned float"),
        ("loss:detached", "contract", "without a graph"),
        ("loss:nan", "loss not finite", "nan"),
        ("loss:infinite-gradient", "gradient not finite", "weight is not finite"),
        ("optimizer:none", "contract", "optimizer() returned None, not an optimizer"),
        ("optimizer:closure", "contract", "LBFGS.step() needs 'closure'"),
    ],
)
def test_a_workload_that_does_not_train_is_reported_as_that(run, fault, rule, words):
    result = run(fault)

    assert result.verdict is Verdict.ERROR
    assert result.evidence.rule == rule
    assert words in result.evidence.text


@pytest.mark.parametrize("batch", ["batch:list", "batch:lists"])
def test_a_batch_may_be_a_list_of_examples(run, batch):
    assert run(batch).verdict is Verdict.FITS


def test_a_hanging_worker_is_ended_at_its_timeout_with_its_last_lines(run):
    started = time.monotonic()
    result = run("backward:hang", timeout_s=1.0)

    assert result.verdict is Verdict.TIMEOUT
    assert result.evidence.phase == "backward"
    assert result.evidence.output_tail[:2] == ("about to fail in backward", "about to hang")
    assert any("faulty.py" in line and "in fail" in line for line in result.evidence.output_tail)
    assert time.monotonic() - started < 10


def test_passing_the_limit_on_host_memory_ends_the_trial(run):
    small = DeviceSpec(
        kind=DeviceKind.CPU, slug="cpu", name="CPU", total_bytes=GIB, limit_bytes=2**20
    )
    result = run("none", device=small)

    assert result.verdict is Verdict.HOST_OOM
    assert result.demand_bytes > small.limit_bytes
    assert run("none").verdict is Verdict.FITS


def test_closing_the_runner_leaves_no_process(fault_file, tmp_path):
    present = {p.pid for p in descendants()}
    fault = tmp_path / "fault"
    fault.write_text("none")
    with TrialRunner(
        str(WORKLOADS / "faulty.py"), {}, environment={"FAULT": str(fault)}, load_timeout_s=120
    ) as runner:
        runner.open()
        assert runner.run(spec()).verdict is Verdict.FITS

    assert {p.pid for p in descendants()} <= present


def test_a_killed_nursery_ends_its_worker_and_is_started_once_more(fault_file, tmp_path):
    present = {p.pid for p in descendants()}
    fault = tmp_path / "fault"
    fault.write_text("loss:hang")
    with TrialRunner(
        str(WORKLOADS / "faulty.py"),
        {},
        environment={"FAULT": str(fault)},
        load_timeout_s=120,
        on_mark=lambda mark: _kill_nursery() if mark.phase == "forward" else None,
    ) as runner:
        runner.open()
        result = runner.run(spec())

        again = runner_after_fault(runner, fault)

    assert result.verdict is Verdict.CRASH
    assert again.verdict is Verdict.FITS
    assert {p.pid for p in descendants()} <= present


def runner_after_fault(runner, fault):
    """The next trial, for which the runner has to start what was killed once more."""
    fault.write_text("none")
    return runner.run(spec())


def _kill_nursery():
    for process in psutil.Process().children():
        if "memfit.trial.nursery" in " ".join(process.cmdline()):
            children = process.children()
            if children:  # not the module's own, which has none now
                os.kill(process.pid, signal.SIGKILL)
