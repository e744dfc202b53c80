"""The fault matrix: every kind of failure in every phase of a trial, on the CPU and on GPUs.

Each fault is a trial of its own with a fault of its own, in real processes, with real kills and
the real allocator's failures; `gpu` is the stand-in card, `real` the same card posing as a real
device, whose limit is held by the allocator. After each one, nothing of it may be left and the
next trial must come out as it did before.
"""

import contextlib
import dataclasses
import signal
import time
from pathlib import Path

import psutil
import pytest

from memfit import virtual
from memfit.records import DeviceKind, DeviceSpec, Split, TrialResult, TrialSpec, Verdict
from memfit.trial.runner import TrialRunner
from memfit.units import GIB, MIB
from tests.trial.groups import MEMORY, memory_group

WORKLOADS = Path(__file__).parents[1] / "workloads"
CARD = virtual.find_card("rtx-3090")
CONTEXT = virtual.context_charge(CARD)[0]
DEVICES = ["cpu", pytest.param("gpu", marks=pytest.mark.virtual)]
GPUS = [
    pytest.param("gpu", marks=pytest.mark.virtual),
    pytest.param("real", marks=pytest.mark.virtual),
]

PLACES = {
    "model": ("build", None),
    "optimizer": ("build", None),
    "batch": ("built", None),
    "loss": ("forward", 1),
    "backward": ("backward", 1),
    "step": ("optimizer_step", 1),
    "later-loss": ("forward", 2),
    "later-step": ("optimizer_step", 2),
}
"""Where the workload fails, with the phase and the group that a trial tells of it."""
EVERYWHERE = {
    "raise": (Verdict.ERROR, "exception"),
    "exit": (Verdict.ERROR, "exception"),
    "vanish": (Verdict.CRASH, "no report"),
    "kill": (Verdict.CRASH, "SIGKILL"),
    "wild-pointer": (Verdict.CRASH, "SIGSEGV"),
    "abort": (Verdict.CRASH, "SIGABRT"),
    "hang": (Verdict.TIMEOUT, "timeout"),
    "memory-error": (Verdict.HOST_OOM, "MemoryError"),
    "host-oom": (Verdict.HOST_OOM, "host allocator"),
    "illegal-access": (Verdict.ERROR, "exception"),
    "device-assert": (Verdict.ERROR, "exception"),
}
"""What fails in every place, with the verdict and the rule that decides it."""
ANYWHERE = {
    "says-oom": (Verdict.ERROR, "exception"),
    "says-runtime": (Verdict.ERROR, "exception"),
    "bus-error": (Verdict.CRASH, "SIGBUS"),
    "terminate": (Verdict.OOM, "CUDA runtime"),
    "numpy-oom": (Verdict.HOST_OOM, "MemoryError"),
    "no-kernel": (Verdict.ERROR, "exception"),
    "bad-launch": (Verdict.ERROR, "exception"),
    "cudnn": (Verdict.ERROR, "exception"),
    "mig": (Verdict.ERROR, "exception"),
    "cublas": (Verdict.OOM, "cuBLAS"),
}
"""What fails in one place that stands for the others."""
ON_GPUS = {
    "wrapped-oom": (Verdict.OOM, "torch.OutOfMemoryError"),
    "cudnn-full": (Verdict.OOM, "cuDNN not supported"),
    "index-limit": (Verdict.SIZE_LIMIT, "32-bit index"),
}
DOUBTFUL = {"terminate", "cudnn-full"}
LEAVES_NO_REPORT = {"vanish", "kill", "wild-pointer", "bus-error", "abort", "terminate", "hang"}
TELLS_ITS_STACK = {"wild-pointer", "bus-error", "abort", "terminate", "hang"}
CROWDED = 768 * MIB
"""Memory of a control group that a nursery fits into, and a trial that eats does not."""
SOON = 2.0
"""Seconds that a trial which hangs is given."""


def device(kind, limit=None):
    if kind == "cpu":
        return DeviceSpec(
            kind=DeviceKind.CPU, slug="cpu", name="CPU", total_bytes=64 * GIB, limit_bytes=32 * GIB
        )
    return DeviceSpec(
        kind=DeviceKind.VIRTUAL if kind == "gpu" else DeviceKind.CUDA,
        slug=CARD.slug,
        name=CARD.name,
        total_bytes=CARD.total_bytes,
        limit_bytes=limit or 16 * GIB,
        context_bytes=CONTEXT,
    )


def spec(on, **changes):
    fields = {
        "index": 1,
        "purpose": "search",
        "split": Split(microbatch=4, accumulation_steps=2),
        "group_microbatches": 2,
        "device": on,
        "timeout_s": 120.0,
    }
    return TrialSpec(**{**fields, **changes})


def stored(result):
    """Return a result as a document would hold it, read again."""
    import msgspec

    return msgspec.json.decode(msgspec.json.encode(result), type=TrialResult)


def figures(result):
    """What has to be the same in every trial of the same kind on a virtual card."""
    memory = dataclasses.asdict(result.devices[0])
    for phase in memory["phases"]:
        del phase["seconds"]
    return memory


class Bench:
    """A runner of one kind of device, and what its trials come to when nothing fails."""

    def __init__(self, kind, runner, fault_file):
        self.kind = kind
        self.runner = runner
        self.fault_file = fault_file
        self.clean = self.run("none")

    def run(self, fault, **changes):
        self.fault_file.write_text(fault)
        return self.runner.run(spec(device(self.kind), **changes))

    @property
    def nursery(self):
        """The process that imports and forks."""
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.Error):
                if child.environ().get("FAULT") == str(self.fault_file):
                    return child
        raise AssertionError("no nursery")

    def leftovers(self):
        """Processes of trials that still run."""
        found = []
        for _ in range(100):
            found = [
                p
                for p in self.nursery.children(recursive=True)
                if p.status() != psutil.STATUS_ZOMBIE
            ]
            if not found:
                break
            time.sleep(0.02)
        return found

    def check_unharmed(self):
        """The next trial comes out as it did before anything failed."""
        assert self.leftovers() == []
        after = self.run("none")
        assert after.verdict is Verdict.FITS
        assert after.optimizer_steps_applied == 2
        if self.kind != "cpu":
            assert figures(after) == figures(self.clean)


@contextlib.contextmanager
def opened(kind, folder, **environment):
    fault_file = folder / f"fault-{kind}"
    fault_file.write_text("none")
    variables = {"FAULT": str(fault_file), **environment}
    if kind == "cpu":
        variables["CUDA_VISIBLE_DEVICES"] = ""
    else:
        variables |= virtual.prepare(CARD, total_bytes=CARD.total_bytes)
    with TrialRunner(
        str(WORKLOADS / "faulty.py"), {}, environment=variables, load_timeout_s=300
    ) as runner:
        runner.open()
        yield Bench(kind, runner, fault_file)


@pytest.fixture(scope="module")
def benches(tmp_path_factory):
    """Open a runner for each kind of device once it is needed."""
    made = {}
    with contextlib.ExitStack() as stack:

        def bench(kind):
            if kind not in made:
                folder = tmp_path_factory.mktemp("faults")
                made[kind] = stack.enter_context(opened(kind, folder))
            return made[kind]

        yield bench


def check(bench, result, place, what, expected):
    verdict, rule = expected
    phase, group = PLACES[place]
    evidence = result.evidence
    assert (result.verdict, evidence.rule) == (verdict, rule), evidence
    assert (evidence.phase, evidence.group or None) == (phase, group)
    assert f"about to fail in {place}" in evidence.output_tail
    assert any("faulty.py" in line for line in evidence.output_tail) is (what in TELLS_ITS_STACK)
    assert evidence.doubtful is (what in DOUBTFUL)
    assert (evidence.traceback is None) is (what in LEAVES_NO_REPORT)
    assert result.verdict.limits_size is (
        verdict in (Verdict.OOM, Verdict.HOST_OOM, Verdict.SIZE_LIMIT)
    )
    assert stored(result) == result
    bench.check_unharmed()


@pytest.mark.parametrize("what", EVERYWHERE)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", DEVICES)
def test_a_fault_gets_its_verdict_in_every_phase(benches, kind, place, what):
    bench = benches(kind)
    limit = {"timeout_s": SOON} if what == "hang" else {}

    check(bench, bench.run(f"{place}:{what}", **limit), place, what, EVERYWHERE[what])


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", GPUS)
def test_the_device_can_run_out_of_memory_in_every_phase(benches, kind, place):
    bench = benches(kind)
    result = bench.run(f"{place}:device-oom")

    check(bench, result, place, "device-oom", (Verdict.OOM, "torch.OutOfMemoryError"))
    assert result.demand_bytes > (1 << 50) - 2 * MIB


@pytest.mark.parametrize("what", ANYWHERE)
@pytest.mark.parametrize("kind", DEVICES)
def test_a_fault_gets_its_verdict(benches, kind, what):
    bench = benches(kind)
    check(bench, bench.run(f"loss:{what}"), "loss", what, ANYWHERE[what])


@pytest.mark.parametrize("what", ON_GPUS)
@pytest.mark.parametrize("kind", GPUS)
def test_a_fault_of_the_device_gets_its_verdict(benches, kind, what):
    bench = benches(kind)
    check(bench, bench.run(f"backward:{what}"), "backward", what, ON_GPUS[what])


@pytest.mark.parametrize("place", ["model", "backward", "later-step"])
@pytest.mark.parametrize("kind", DEVICES)
def test_processes_that_a_trial_leaves_are_ended_with_it(benches, kind, place):
    bench = benches(kind)
    result = bench.run(f"{place}:orphan")
    pid = int(bench.fault_file.with_suffix(".pid").read_text())

    assert result.verdict is Verdict.FITS
    assert bench.leftovers() == []
    for _ in range(100):
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return
        time.sleep(0.02)
    pytest.fail(f"process {pid} still runs")


# -- in a DataLoader's worker --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "verdict", "rule"),
    [
        ("raise", Verdict.ERROR, "exception"),
        ("says-oom", Verdict.ERROR, "exception"),
        ("says-runtime", Verdict.ERROR, "exception"),
        ("memory-error", Verdict.HOST_OOM, "MemoryError"),
        ("host-oom", Verdict.HOST_OOM, "host allocator"),
        ("numpy-oom", Verdict.HOST_OOM, "MemoryError"),
        ("kill", Verdict.ERROR, "exception"),
        ("wild-pointer", Verdict.ERROR, "exception"),
        ("vanish", Verdict.ERROR, "exception"),
        ("bus-error", Verdict.ERROR, "exception"),
    ],
)
@pytest.mark.parametrize("kind", DEVICES)
def test_a_fault_in_a_process_of_a_dataloader_gets_its_verdict(benches, kind, what, verdict, rule):
    bench = benches(kind)
    result = bench.run(f"loader:{what}")

    assert (result.verdict, result.evidence.rule) == (verdict, rule), result.evidence
    assert result.evidence.phase == "built"
    assert "about to fail in loader" in result.evidence.output_tail
    assert stored(result) == result
    bench.check_unharmed()


# -- the host's own killer -----------------------------------------------------------------------


@pytest.fixture
def crowded(benches):
    """A control group with too little memory, with a runner's nursery moved into it."""
    bench = benches("cpu")
    home = Path("/proc/self/cgroup").read_text()
    with memory_group(CROWDED) as group:
        (group / "cgroup.procs").write_text(str(bench.nursery.pid))
        yield bench
        (_home(group, home) / "cgroup.procs").write_text(str(bench.nursery.pid))


def _home(group, told):
    """Return the folder of the group that this process is in."""
    folder = group.parent
    for line in told.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == ("memory" if folder.name == "memory" else ""):
            return folder / path.lstrip("/")
    return folder


@pytest.mark.skipif(MEMORY is None, reason="no control group can be made here")
@pytest.mark.parametrize("place", ["model", "loss", "backward", "step", "later-loss"])
def test_a_worker_that_the_kernel_kills_for_want_of_memory_is_host_oom(crowded, place):
    result = crowded.run(f"{place}:eat")
    host = result.evidence.host

    assert result.verdict is Verdict.HOST_OOM, result.evidence
    assert result.evidence.phase == PLACES[place][0]
    assert result.evidence.exit_code == -signal.SIGKILL
    assert host.cgroup_limit_bytes == CROWDED
    assert host.kernel_log == "names it" or host.cgroup_oom_kills == 1
    assert not result.evidence.doubtful
    assert stored(result) == result
    crowded.check_unharmed()


@pytest.mark.skipif(MEMORY is None, reason="no control group can be made here")
def test_a_worker_that_somebody_kills_in_the_same_group_is_a_crash(crowded):
    result = crowded.run("loss:kill")

    assert (result.verdict, result.evidence.rule) == (Verdict.CRASH, "SIGKILL")
    assert result.evidence.host.cgroup_oom_kills == 0
    crowded.check_unharmed()


@pytest.mark.skipif(MEMORY is None, reason="no control group can be made here")
def test_a_process_of_a_dataloader_that_the_kernel_kills_is_host_oom(crowded):
    result = crowded.run("loader:eat")

    assert result.verdict is Verdict.HOST_OOM, result.evidence
    assert "killed" in result.evidence.text
    assert result.evidence.host.cgroup_limit_bytes == CROWDED
    crowded.check_unharmed()
