"""memfit beside other batch size finders: time, trials and answers on eight workloads.

    pip install -e '.[bench]'
    python -m tests.benchmarks.peers --store speed.jsonl --markdown reports/speed.md

Every finder runs as a whole process on the same virtual card with the same limit. Runs take turns,
so that a busy machine slows all of them alike. Then every size is tried one by one, which is the
truth that answers are held against, and each answer runs 20 groups in a fresh process. What is
finished is kept in the store, and the same command goes on from there.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import resource
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil

from memfit import virtual
from memfit.batch import UNSPLIT_ACCUMULATION_STEPS, candidates
from memfit.devices.select import choose, describe
from memfit.question import worker_environment
from memfit.records import Policy, ProbeResult, Split, TrialResult, Verdict, from_json
from memfit.units import format_bytes
from tests.benchmarks.cases import CASES
from tests.benchmarks.scan import Row, Scanner, Setting, scanner

MEMFIT = "memfit"
PEERS = {
    "Lightning, power": "lightning-power",
    "Lightning, binsearch": "lightning-binsearch",
    "accelerate": "accelerate",
}
FINDERS = (MEMFIT, *PEERS)
PACKAGES = ("memfit", "torch", "lightning", "accelerate")
GROUPS = 20
"""Groups that an answer has to survive."""
BEYOND = 3
"""Sizes in a row whose need alone is above the limit, at which a scan ends."""
DEADLINE_S = 600.0
"""A finder that takes longer is ended, as is one that takes half of the host's memory."""
PHASES_OF = "transformer"
"""The workload whose probe is taken apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One finder on one workload, once."""

    case: str
    finder: str
    turn: int
    wall_s: float
    """From the start of the process to its end."""
    cpu_s: float
    """Processor time of it and its children."""
    answer: int | None
    failure: str | None
    sizes: tuple[int, ...]
    """Sizes in the order in which they were tried."""
    fitted: tuple[bool, ...]
    examples: int
    """Examples that went into a forward pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Survival:
    """What became of an answer in a fresh process."""

    case: str
    answer: int
    verdict: Verdict
    groups_run: int
    text: str

    @property
    def survives(self) -> bool:
        """Whether all groups ran."""
        return self.verdict is Verdict.FITS and self.groups_run >= GROUPS


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """What trying every size of one workload showed."""

    case: str
    limit_bytes: int
    rows: tuple[Row, ...]

    @property
    def largest(self) -> int | None:
        """The largest size that fits."""
        return max((row.microbatch for row in self.rows if row.fits), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Phases:
    """The steps of one probe, with their seconds."""

    turn: int
    steps: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What is measured on."""

    versions: str
    build_s: float
    """Seconds of building the virtual GPU's driver, once per installation."""
    load: float
    """Load average when the measurement began."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A line of the store: one of these."""

    run: Run | None = None
    survival: Survival | None = None
    truth: Truth | None = None
    phases: Phases | None = None
    machine: Machine | None = None


class Store:
    """A file with one entry a line, so that a measurement can be interrupted and go on."""

    def __init__(self, path: Path) -> None:
        """Read what is there."""
        self._path = path
        lines = path.read_bytes().splitlines() if path.exists() else []
        self.entries = [msgspec.json.decode(line, type=Entry) for line in lines]

    def add(self, entry: Entry) -> None:
        """Keep an entry."""
        self.entries.append(entry)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("ab") as file:
            file.write(msgspec.json.encode(entry) + b"\n")

    @property
    def machine(self) -> Machine | None:
        """Return what was measured on."""
        return next((e.machine for e in self.entries if e.machine), None)

    def runs(self, case: str, finder: str) -> list[Run]:
        """Return the runs of a finder on a workload."""
        found = [e.run for e in self.entries if e.run]
        return [r for r in found if (r.case, r.finder) == (case, finder)]

    def truth(self, case: str) -> Truth | None:
        """Return the truth of a workload, where it is known."""
        return next((e.truth for e in self.entries if e.truth and e.truth.case == case), None)

    def survival(self, case: str, answer: int | None) -> Survival | None:
        """Return what became of an answer."""
        found = [e.survival for e in self.entries if e.survival]
        return next((s for s in found if (s.case, s.answer) == (case, answer)), None)

    def phases(self) -> list[dict[str, float]]:
        """Return the steps of the probes that were taken apart."""
        return [e.phases.steps for e in self.entries if e.phases]


# -- running -------------------------------------------------------------------------------------


def timed(
    command: Sequence[str], environment: Mapping[str, str]
) -> tuple[subprocess.CompletedProcess[str], float, float]:
    """Run a process to its end; return it, its seconds and its processor seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.monotonic()
    process = subprocess.Popen(
        command,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    most = psutil.virtual_memory().total // 2
    while True:
        try:
            said, complained = process.communicate(timeout=1)
            break
        except subprocess.TimeoutExpired:
            words = None
            if time.monotonic() - began > DEADLINE_S:
                words = f"ended after {DEADLINE_S:.0f} s"
            elif _resident_bytes(process.pid) > most:
                words = f"ended with more than {format_bytes(most)} of host memory"
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        if words is not None:
            os.killpg(process.pid, signal.SIGKILL)
            said, complained = process.communicate()
            complained += f"\n{words}"
            break
    done = subprocess.CompletedProcess(command, process.returncode, said, complained)
    wall = time.monotonic() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return done, wall, cpu


def _resident_bytes(pid: int) -> int:
    """Return the resident memory of a process, without its children."""
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0


def probe_words(setting: Setting) -> list[str]:
    """Return the words of the `memfit probe` that is measured."""
    words = ["probe", setting.target, "--device", setting.card]
    words += ["--precision", setting.precision.value, "--allocator", "default"]
    return words + [
        word for name, value in setting.parameters.items() for word in ("--set", f"{name}={value}")
    ]


def run_memfit(case: str, turn: int, folder: Path) -> Run:
    """Run `memfit probe` as its user does, report included."""
    out = folder / "probe"
    command = [sys.executable, "-m", "memfit", *probe_words(CASES[case]), "--out", str(out)]
    done, wall, cpu = timed(command, {})
    path = out / "memfit.json"
    if done.returncode or not path.exists():
        return _failed(case, MEMFIT, turn, wall, cpu, done.stderr)
    result = from_json(path.read_bytes(), ProbeResult, origin="memfit.json")
    return Run(
        case=case,
        finder=MEMFIT,
        turn=turn,
        wall_s=wall,
        cpu_s=cpu,
        answer=result.split.microbatch,
        failure=None,
        sizes=tuple(trial.spec.split.microbatch for trial in result.trials),
        fitted=tuple(trial.verdict is Verdict.FITS for trial in result.trials),
        examples=sum(examples_of(trial) for trial in result.trials),
    )


def _failed(case: str, finder: str, turn: int, wall: float, cpu: float, said: str) -> Run:
    lines = [line for line in said.splitlines() if line.strip()]
    return Run(
        case=case,
        finder=finder,
        turn=turn,
        wall_s=wall,
        cpu_s=cpu,
        answer=None,
        failure=lines[-1][-300:] if lines else "it ended without a word",
        sizes=(),
        fitted=(),
        examples=0,
    )


def examples_of(trial: TrialResult) -> int:
    """Count the examples that went into a forward pass."""
    sizes, evidence = trial.spec.sizes, trial.evidence
    if trial.verdict is Verdict.FITS or evidence.group is None:
        return trial.groups_run * sum(sizes)
    return (evidence.group - 1) * sum(sizes) + sum(sizes[: evidence.microbatch_index or len(sizes)])


def run_peer(case: str, finder: str, turn: int, folder: Path) -> Run:
    """Run another finder."""
    setting = CASES[case]
    choice = choose(setting.card)
    device = describe(choice, memory_limit=setting.memory_limit, headroom=setting.headroom)
    path = folder / "result.json"
    command = [sys.executable, "-m", "tests.benchmarks.finders", PEERS[finder], case]
    done, wall, cpu = timed([*command, "--result", str(path)], worker_environment(choice, device))
    if done.returncode or not path.exists():
        return _failed(case, finder, turn, wall, cpu, done.stderr)
    said = json.loads(path.read_text())
    if said["total_bytes"] != device.limit_bytes:
        raise SystemExit(f"{finder} ran on a device of {said['total_bytes']} bytes")
    return Run(
        case=case,
        finder=finder,
        turn=turn,
        wall_s=wall,
        cpu_s=cpu,
        answer=said["answer"],
        failure=said["failure"],
        sizes=tuple(trial["size"] for trial in said["trials"]),
        fitted=tuple(trial["fits"] for trial in said["trials"]),
        examples=said["examples"],
    )


def measure(store: Store, cases: Sequence[str], repeats: int) -> None:
    """Run what the store does not have yet."""
    if store.machine is None:
        build = build_seconds()
        store.add(
            Entry(machine=Machine(versions=versions(), build_s=build, load=os.getloadavg()[0]))
        )
    for turn in range(1, repeats + 1):
        for case in cases:
            for finder in FINDERS:
                if any(run.turn == turn for run in store.runs(case, finder)):
                    continue
                with tempfile.TemporaryDirectory(prefix="memfit-bench-") as made:
                    folder = Path(made)
                    if finder == MEMFIT:
                        run = run_memfit(case, turn, folder)
                    else:
                        run = run_peer(case, finder, turn, folder)
                store.add(Entry(run=run))
                _tell(f"turn {turn}, {case}, {finder}: {run.wall_s:.2f} s, {_said(run)}")
        if PHASES_OF in cases and len(store.phases()) < turn:
            store.add(Entry(phases=Phases(turn=turn, steps=run_phases())))
    for case in cases:
        prove(store, case)


def _tell(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)


def _said(run: Run) -> str:
    return str(run.answer) if run.failure is None else f"failed: {run.failure}"


def prove(store: Store, case: str) -> None:
    """Find the truth of a workload, and run every answer for long."""
    answers = {run.answer for finder in FINDERS for run in store.runs(case, finder) if run.answer}
    missing = sorted(answer for answer in answers if store.survival(case, answer) is None)
    if not missing and store.truth(case) is not None:
        return
    with scanner(CASES[case]) as trials:
        for answer in missing:
            store.add(Entry(survival=survive(trials, case, answer)))
        if store.truth(case) is None:
            rows = scan(trials)
            truth = Truth(case=case, limit_bytes=trials.device.limit_bytes, rows=rows)
            store.add(Entry(truth=truth))
            _tell(f"{case}: the largest of {len(rows)} sizes that fits is {truth.largest}")


def survive(trials: Scanner, case: str, answer: int) -> Survival:
    """Run an answer over many groups in a fresh process."""
    split = Split(microbatch=answer, accumulation_steps=UNSPLIT_ACCUMULATION_STEPS)
    result = trials.trial(split, groups=GROUPS)
    return Survival(
        case=case,
        answer=answer,
        verdict=result.verdict,
        groups_run=result.groups_run,
        text=result.evidence.text,
    )


def scan(trials: Scanner) -> tuple[Row, ...]:
    """Try every size."""
    every = candidates(logical_batch=None, replicas=1, policy=Policy.EXACT, max_microbatch=None)
    return tuple(trials.scan(map(every.split, every.sizes), beyond=BEYOND))


def build_seconds() -> float:
    """Build the driver into an empty cache and say how long it took."""
    kept = os.environ.get("MEMFIT_CACHE")
    card = virtual.find_card(Setting().card)
    with tempfile.TemporaryDirectory(prefix="memfit-bench-") as cache:
        os.environ["MEMFIT_CACHE"] = cache
        began = time.monotonic()
        try:
            virtual.prepare(card, total_bytes=card.total_bytes)
        finally:
            del os.environ["MEMFIT_CACHE"]
            if kept is not None:
                os.environ["MEMFIT_CACHE"] = kept
        return time.monotonic() - began


def run_phases() -> dict[str, float]:
    """Take a probe's own time apart, in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="memfit-bench-") as made:
        path = Path(made) / "phases.json"
        setting = CASES[PHASES_OF]
        command = [sys.executable, "-m", "tests.benchmarks.phases", setting.target]
        command += ["--device", setting.card, "--precision", setting.precision.value]
        command += ["--json", str(path)]
        done, wall, _ = timed(command, {"MEMFIT_BENCH_BEGAN": repr(time.time())})
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} ended with {done.returncode}\n{done.stderr}")
        steps: dict[str, float] = json.loads(path.read_text())
    return {**steps, "end Python": max(wall - sum(steps.values()), 0.0)}


def versions() -> str:
    """Name the versions and the machine."""
    packages = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES)
    memory = format_bytes(psutil.virtual_memory().total)
    return (
        f"{packages}; Python {platform.python_version()}; {_processor()}, "
        f"{psutil.cpu_count()} logical cores, {memory} of memory; {platform.system()}"
    )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.machine()


def main() -> int:
    """Measure and tell."""
    from tests.benchmarks import peers_page

    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.peers", description="Compare batch size finders."
    )
    parser.add_argument("--cases", default=",".join(CASES), help="comma-separated (all)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--store", type=Path, default=Path("build/speed.jsonl"), help="where runs are kept"
    )
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    parser.add_argument("--only-tell", action="store_true", help="run nothing")
    asked = parser.parse_args()
    cases = asked.cases.split(",")
    store = Store(asked.store)
    if not asked.only_tell:
        measure(store, cases, asked.repeats)
    words = [word for word in sys.argv[1:] if word != "--only-tell"]
    command = shlex.join(["python", "-m", "tests.benchmarks.peers", *words])
    page = peers_page.page(store, cases, command=command)
    print(page)
    if asked.markdown is not None:
        asked.markdown.write_text(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
