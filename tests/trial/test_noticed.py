"""What a trial shows beside its groups: resumed starts, evaluation, unlike batches, compilation."""

from __future__ import annotations

import os

import pytest

from memfit import virtual
from memfit.devices.nvml import Nvml
from memfit.explain import noticed
from memfit.records import Observed, Split, Verdict
from memfit.trial.noticing import Noticing
from memfit.trial.runner import TrialRunner
from memfit.units import GIB
from tests.trial.test_virtual_trials import CARD, WORKLOADS, phases, spec

pytestmark = pytest.mark.virtual


@pytest.fixture(scope="module")
def kind(tmp_path_factory):
    return tmp_path_factory.mktemp("unlike") / "kind"


@pytest.fixture(scope="module")
def runner(kind):
    kind.write_text("none")
    environment = virtual.prepare(CARD, total_bytes=CARD.total_bytes) | {"UNLIKE": str(kind)}
    target = str(WORKLOADS / "unlike.py")
    with TrialRunner(target, {}, environment=environment, load_timeout_s=300) as made:
        made.open()
        yield made


@pytest.fixture
def run(runner, kind):
    def run(what="none", **changes):
        kind.write_text(what)
        return runner.run(spec(**changes))

    return run


def test_a_resumed_start_has_the_optimizers_state_in_its_first_forward(run):
    fresh, resumed = run(), run(resumed=True)
    state = fresh.composition.optimizer_state_bytes

    def first_forward(result):
        return phases(result)["forward", "first"].peak_allocated_bytes

    assert resumed.verdict is Verdict.FITS
    assert state > 0
    assert first_forward(resumed) - first_forward(fresh) >= state
    assert "a second copy of it for a moment" in noticed(resumed)[-1]


def test_an_evaluation_pass_is_measured_apart_and_leaves_the_groups_alone(run):
    plain, evaluated = run(), run(evaluate=True)

    assert plain.observed.evaluation is None
    peak = evaluated.observed.evaluation
    assert peak is not None
    assert 0 < peak.peak_allocated_bytes < plain.peak_allocated_bytes
    assert evaluated.peak_allocated_bytes == plain.peak_allocated_bytes


def test_an_evaluation_pass_that_does_not_fit_says_so_in_its_own_phase(run):
    result = run("heavy", evaluate=True)

    assert result.verdict is Verdict.OOM
    assert result.evidence.phase == "evaluate"
    assert result.groups_run >= 1
    assert result.observed.evaluation is None


def test_batches_whose_shapes_and_counts_differ_from_call_to_call_are_noticed(run):
    result = run("shapes")

    assert set(result.observed.unlike_shapes) == {"4x1x256", "4x2x256", "4x3x256"}
    assert result.observed.unlike_counts == (4, 12)
    shapes, counts = noticed(result)
    assert shapes.startswith("batch(4) returned unlike shapes from call to call ((4x")
    assert counts.startswith("count() of microbatches of one size lay between 4 and 12")


def test_batches_that_are_alike_are_not_accused(run):
    assert noticed(run()) == ()


def test_microbatches_of_two_sizes_are_not_unlike(run):
    result = run(split=Split(microbatch=3, accumulation_steps=2, logical_batch=5))

    assert result.spec.sizes == (3, 2)
    assert result.observed.unlike_shapes == ()


def test_graphs_of_the_first_group_and_recompilations_are_counted_apart(run):
    result = run("compiled", groups=3)

    assert result.verdict is Verdict.FITS
    assert (result.observed.graphs_first_group, result.observed.graphs_later) == (1, 0)
    assert noticed(result) == (
        "torch.compile compiled 1 graphs up to the end of group 1 and none after it",
    )


class FakeNvml:
    """NVML with two processes on its GPU, one of them this one."""

    class NVMLError(Exception):
        """What NVML raises."""

    def __init__(self, *pids):
        self.pids = pids

    def nvmlDeviceGetHandleByUUID(self, uuid):  # noqa: N802
        return uuid

    def nvmlDeviceGetComputeRunningProcesses(self, handle):  # noqa: N802
        class Process:
            def __init__(self, pid):
                self.pid, self.usedGpuMemory = pid, 3 * GIB

        return [Process(pid) for pid in self.pids]


def test_another_process_on_the_gpu_is_named_with_its_bytes(monkeypatch):
    def opened(self):
        self._nvml = FakeNvml(os.getpid(), os.getppid())

    monkeypatch.setattr(Nvml, "__init__", opened)
    noticing = Noticing()
    noticing.others("abc")
    (seen,) = noticing.fill(Observed()).other_processes
    assert (seen.pid, seen.used_bytes) == (os.getppid(), 3 * GIB)
    assert seen.name


def test_a_virtual_gpu_has_no_other_processes(run):
    assert run().observed.other_processes == ()


def test_a_model_that_is_built_on_the_host_first_says_what_that_takes(run):
    plain, moved = run(), run("on the host")

    assert not [limit for limit in plain.limits if "host memory" in limit]
    (said,) = [limit for limit in moved.limits if "host memory" in limit]
    assert said.startswith("Building the model took 7")  # 720 MiB of ones
    assert "MiB of host memory: model() makes parameters on the CPU" in said
