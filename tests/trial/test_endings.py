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
        ("loss:vector", "contract", "shape (4, 8), not a scalar"),
        ("loss:float", "contract", "loss() returned float"),
        ("loss:detached", "contract", "without a graph"),
        ("loss:nan", "loss not finite", "nan"),
        ("loss:infinite-gradient", "gradient not finite", "weight is not finite"),
        ("optimizer:none", "contract", "optimizer() returned NoneType"),
    ],
)
def test_a_workload_that_does_not_train_is_reported_as_that(run, fault, rule, words):
    result = run(fault)

    assert result.verdict is Verdict.ERROR
    assert result.evidence.rule == rule
    assert words in result.evidence.text


@pytest.mark.parametrize("place", ["model", "batch", "loss", "backward", "step"])
def test_a_killed_worker_is_a_crash_in_every_phase(run, place):
    result = run(f"{place}:kill")

    assert result.verdict is Verdict.CRASH
    assert result.evidence.rule == "SIGKILL"


def test_a_segmentation_fault_is_a_crash(run):
    assert run("loss:segfault").evidence.rule == "SIGSEGV"


@pytest.mark.parametrize("what", ["exit", "vanish"])
def test_a_worker_that_leaves_early_does_not_fit(run, what):
    assert run(f"loss:{what}").verdict in (Verdict.ERROR, Verdict.CRASH)


def test_a_hanging_worker_is_ended_at_its_timeout_with_its_last_lines(run):
    started = time.monotonic()
    result = run("backward:hang", timeout_s=1.0)

    assert result.verdict is Verdict.TIMEOUT
    assert result.evidence.phase == "backward"
    assert result.evidence.output_tail == ("about to hang",)
    assert time.monotonic() - started < 10


def test_running_out_of_host_memory_is_told_from_an_error(run):
    assert run("loss:memory-error").verdict is Verdict.HOST_OOM


def test_a_user_exception_that_speaks_of_memory_is_an_error(run):
    assert run("loss:says-oom").verdict is Verdict.ERROR


def test_passing_the_limit_on_host_memory_ends_the_trial(run):
    small = DeviceSpec(
        kind=DeviceKind.CPU, slug="cpu", name="CPU", total_bytes=GIB, limit_bytes=2**20
    )
    result = run("none", device=small)

    assert result.verdict is Verdict.HOST_OOM
    assert result.demand_bytes > small.limit_bytes


def test_what_a_worker_leaves_behind_is_ended_with_it(run, fault_file):
    assert run("model:orphan").verdict is Verdict.FITS

    pid = int(fault_file.with_suffix(".pid").read_text())
    for _ in range(100):
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie":
            return
        time.sleep(0.02)
    pytest.fail(f"process {pid} still runs")


def test_a_trial_after_a_failed_one_is_not_affected(run):
    before = run("none")
    run("loss:kill")
    after = run("none")

    assert before.verdict is after.verdict is Verdict.FITS


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


def test_a_killed_nursery_ends_its_worker_and_is_reported(fault_file, tmp_path):
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

    assert result.verdict is Verdict.CRASH
    assert {p.pid for p in descendants()} <= present


def _kill_nursery():
    for process in psutil.Process().children():
        if "memfit.trial.nursery" in " ".join(process.cmdline()):
            children = process.children()
            if children:  # not the module's own, which has none now
                os.kill(process.pid, signal.SIGKILL)
