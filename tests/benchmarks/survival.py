"""Does the emitted size survive, and is it the largest? Random workloads on virtual cards.

    python -m tests.benchmarks.survival --count 200 --seed 0 --markdown reports/survival.md

For each drawn question a probe answers. Then, in fresh processes and in full groups: the answer
has to run 20 groups, without allocator retries once the optimizer's state is there; the next
candidate above it must not fit; nor may sizes above it that are taken at random, so that a size
that the search passed over is seen. Where nothing fits, the same is asked of the smallest size.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import os
import platform
import random
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import msgspec

from memfit.allocator import AllocatorChoice
from memfit.batch import Candidates, candidates
from memfit.devices.select import choose, describe
from memfit.errors import NothingFits
from memfit.probe import run_probe
from memfit.question import ProbeRequest, worker_environment
from memfit.records import DeviceSpec, ProbeResult, TrialResult, TrialSpec, Verdict
from memfit.trial.runner import TrialRunner
from tests.benchmarks.draws import TARGET, Question, draw
from tests.benchmarks.nurseries import shared
from tests.benchmarks.scan import Deaf

GROUPS = 20
SETTLED = 4
"""The most groups that a probe's trial runs until its allocator stops retrying."""
NEAR = 6
"""Sizes taken at random from those up to twice the answer."""
FAR = 2
"""Sizes taken at random from all above the answer."""
HEADROOM = "2%"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """One size in a fresh process, in full groups."""

    microbatch: int
    accumulation_steps: int
    verdict: Verdict
    groups_run: int
    retries: int | None
    """Allocator retries in all groups after the first."""
    settling: int | None = None
    """Those of them in groups that a probe's own trial may run, where there are any."""
    peak_bytes: int | None
    text: str
    wall_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What became of one question."""

    question: Question
    limit_bytes: int
    answer: int | None
    """The emitted size; None where nothing fits."""
    certificate: str
    """What bounds the certificate: tried, cap, budget; `nothing fits` without one."""
    trials: int
    sizes: tuple[tuple[int, str], ...]
    """Sizes that the probe tried, in its order, with their verdicts."""
    notes: tuple[str, ...]
    survival: Tried | None
    """The answer over 20 groups."""
    next: Tried | None
    """The next candidate above; None where the answer is the largest candidate."""
    above: tuple[Tried, ...]
    """Other candidates above, at random."""
    wall_s: float
    failure: str | None = None
    """What ended the probe, when that was neither an answer nor that nothing fits."""

    @property
    def faults(self) -> list[str]:
        """What is wrong with the answer, in words."""
        if self.failure is not None:
            return [f"the probe failed: {self.failure}"]
        found = []
        if self.certificate in ("budget", "time"):
            found.append("the search ended before its certificate was whole")
        if self.survival is not None:
            if self.survival.verdict is not Verdict.FITS or self.survival.groups_run < GROUPS:
                found.append(
                    f"{self.answer} did not survive {GROUPS} groups: {self.survival.verdict}, "
                    f"{self.survival.text}"
                )
            elif self.survival.retries != (self.survival.settling or 0):
                found.append(
                    f"{self.answer} had allocator retries after group {SETTLED}: "
                    f"{self.survival.retries} in all, {self.survival.settling or 0} before"
                )
        higher = [tried for tried in (self.next, *self.above) if tried is not None]
        fits = [tried for tried in higher if not tried.verdict.limits_size]
        return found + [f"{t.microbatch} above {self.answer}: {t.verdict}" for t in fits]


def candidates_of(question: Question) -> Candidates:
    """Return the sizes that a probe of this question could answer with."""
    return candidates(
        logical_batch=question.logical_batch,
        replicas=question.replicas,
        policy=question.policy,
        max_microbatch=None,
    )


@contextmanager
def allocator(settings: str) -> Iterator[None]:
    """Have workers that start meanwhile configure PyTorch's allocator so."""
    names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    kept = {name: os.environ.pop(name, None) for name in names}
    if settings:
        os.environ[names[0]] = settings
    try:
        yield
    finally:
        for name, value in kept.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def examine(question: Question) -> Finding:
    """Answer one question with a probe, and put the answer to the proof."""
    began = time.monotonic()
    with allocator(question.allocator):
        result, failure = _probe(question)
        answer = result.split.microbatch if result is not None else None
        proof = _Proof()
        if failure is None:
            proof = _prove(question, answer)
    return Finding(
        question=question,
        limit_bytes=proof.limit_bytes,
        answer=answer,
        certificate=result.certificate.ceiling if result else "nothing fits",
        trials=len(result.trials) if result else 0,
        sizes=tuple((t.spec.split.microbatch, t.verdict.value) for t in result.trials)
        if result
        else (),
        notes=result.notes if result else (),
        survival=proof.survival,
        next=proof.above[0] if proof.above else None,
        above=proof.above[1:],
        wall_s=time.monotonic() - began,
        failure=failure,
    )


def _probe(question: Question) -> tuple[ProbeResult | None, str | None]:
    with tempfile.TemporaryDirectory(prefix="memfit-bench-") as folder:
        request = ProbeRequest(
            target=TARGET,
            parameters={name: str(value) for name, value in question.parameters.items()},
            device=question.card,
            memory=question.memory,
            headroom=HEADROOM,
            logical_batch=question.logical_batch,
            replicas=question.replicas,
            policy=question.policy,
            precision=question.precision,
            clip_norm=question.clip_norm,
            allocator=AllocatorChoice.DEFAULT,
            out=Path(folder) / "probe",
        )
        try:
            return run_probe(request, Deaf())[0], None
        except NothingFits:
            return None, None
        except Exception as error:  # noqa: BLE001 - a probe that fails is a finding
            return None, f"{type(error).__name__}: {error}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Proof:
    """What fresh processes showed of the answer and of what lies above it."""

    limit_bytes: int = 0
    survival: Tried | None = None
    above: tuple[Tried, ...] = ()
    """The next candidate first."""


def _prove(question: Question, answer: int | None) -> _Proof:
    choice = choose(question.card)
    device = describe(choice, memory_limit=None, headroom=HEADROOM, memory=question.memory)
    sizes = candidates_of(question)
    survival = None
    with TrialRunner(
        TARGET,
        question.parameters,
        environment=worker_environment(choice, device),
    ) as runner:
        runner.open()
        if answer is not None:
            survival = _try(runner, device, question, sizes, answer, groups=GROUPS)
            if survival.retries:
                short = _try(runner, device, question, sizes, answer, groups=SETTLED)
                survival = dataclasses.replace(survival, settling=short.retries)
        tried = tuple(
            _try(runner, device, question, sizes, size)
            for size in above(question, sizes.sizes, answer)
        )
    return _Proof(limit_bytes=device.limit_bytes, survival=survival, above=tried)


def above(question: Question, sizes: Sequence[int], answer: int | None) -> list[int]:
    """Pick what is tried above the answer: the next candidate first, then at random."""
    dice = random.Random(f"above {question.index}")
    over = [size for size in sizes if size > (answer or 0)]
    if not over:
        return []
    near = [size for size in over[1:] if size <= 2 * max(answer or 0, over[0])]
    picked = dice.sample(near, min(NEAR, len(near)))
    far = [size for size in over[1:] if size not in picked]
    return [over[0], *sorted([*picked, *dice.sample(far, min(FAR, len(far)))])]


def _try(
    runner: TrialRunner,
    device: DeviceSpec,
    question: Question,
    sizes: Candidates,
    size: int,
    *,
    groups: int = 2,
) -> Tried:
    split = sizes.split(size)
    result = runner.run(
        TrialSpec(
            index=size,
            purpose="confirm",
            split=split,
            group_microbatches=split.accumulation_steps,
            groups=groups,
            precision=question.precision,
            clip_norm=question.clip_norm,
            device=device,
        )
    )
    return Tried(
        microbatch=size,
        accumulation_steps=split.accumulation_steps,
        verdict=result.verdict,
        groups_run=result.groups_run,
        retries=_steady_retries(result),
        peak_bytes=result.peak_bytes,
        text=result.evidence.text,
        wall_s=result.wall_s,
    )


def _steady_retries(result: TrialResult) -> int | None:
    counts = [
        phase.alloc_retries
        for device in result.devices
        for phase in device.phases
        if phase.groups == "later" and phase.alloc_retries is not None
    ]
    return sum(counts) if counts else None


# -- running -------------------------------------------------------------------------------------


class Store:
    """A file with one finding a line, so that a long run can be interrupted and go on."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[bytes, Finding] = {}
        if path.exists():
            for line in path.read_bytes().splitlines():
                finding = msgspec.json.decode(line, type=Finding)
                self._known[_key(finding.question)] = finding

    def __getitem__(self, question: Question) -> Finding | None:
        """Return what is known of a question."""
        return self._known.get(_key(question))

    def add(self, finding: Finding) -> None:
        """Keep a finding."""
        self._known[_key(finding.question)] = finding
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("ab") as file:
            file.write(msgspec.json.encode(finding) + b"\n")


def _key(question: Question) -> bytes:
    return msgspec.json.encode(question)


def run(questions: Sequence[Question], store: Store) -> list[Finding]:
    """Examine what is not known yet; questions with the same nursery follow each other."""
    missing = [question for question in questions if store[question] is None]
    missing.sort(key=lambda q: (q.allocator, q.card, q.index))
    with shared():
        for number, question in enumerate(missing, start=1):
            finding = examine(question)
            store.add(finding)
            said = "; ".join(finding.faults) or "holds"
            print(
                f"{number}/{len(missing)} #{question.index} {question.title}: "
                f"{finding.answer} in {finding.trials} trials, {finding.wall_s:.1f} s: {said}",
                file=sys.stderr,
                flush=True,
            )
    findings = (store[question] for question in questions)
    return [finding for finding in findings if finding is not None]


# -- telling -------------------------------------------------------------------------------------


def _counts(findings: Sequence[Finding], of: Callable[[Finding], str]) -> str:
    counted = collections.Counter(of(finding) for finding in findings)
    return ", ".join(f"{name or 'default'} {count}" for name, count in sorted(counted.items()))


def _row(finding: Finding) -> str:
    q = finding.question
    batch = "-" if q.logical_batch is None else f"{q.logical_batch} {q.policy.value}"
    above = [finding.next, *finding.above]
    tried = ", ".join(f"{t.microbatch} {t.verdict}" for t in above if t is not None)
    survival = finding.survival
    ran = f"{survival.groups_run} groups" if survival else "-"
    cells = [
        str(q.index), q.title, batch, str(q.replicas), f"{q.card}, {q.memory}",
        q.allocator or "default", str(finding.answer or "none"), str(finding.trials), ran,
        tried or "none is larger", "; ".join(finding.faults) or "holds",
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def as_markdown(findings: Sequence[Finding], *, command: str) -> str:
    """Write the page."""
    answered = [f for f in findings if f.answer is not None]
    bounded = [f for f in answered if f.next is not None]
    sound = [f for f in findings if not f.faults]
    lasting = [f for f in answered if f.survival and f.survival.verdict is Verdict.FITS]
    settled = [f for f in answered if f.survival and f.survival.retries]
    above = [t for f in findings for t in ((f.next, *f.above) if f.next else ())]
    refused = [t for t in above if t.verdict.limits_size]
    next_refused = [f for f in bounded if f.next and f.next.verdict.limits_size]
    holes = [f for f in answered if any(v != "fits" and m < (f.answer or 0) for m, v in f.sizes)]
    thrashing = [f for f in findings if any(v == "thrash" for _, v in f.sizes)]
    trials = sorted(f.trials for f in answered)
    kinds = _counts(findings, lambda f: str(f.question.parameters["kind"]))
    updates = _counts(findings, lambda f: str(f.question.parameters["update"]))
    precisions = _counts(findings, lambda f: f.question.precision.value)
    allocators = _counts(findings, lambda f: f.question.allocator)
    cards = _counts(findings, lambda f: f.question.card)
    checkpointed = sum(bool(f.question.parameters["checkpointed"]) for f in findings)
    kept = sum(f.question.logical_batch is not None for f in findings)
    replicas = sum(f.question.replicas > 1 for f in findings)
    return f"""\
# Survival: random workloads, and whether the emitted size stays good

{len(findings)} questions were drawn at random and answered by a probe on **virtual** cards. Then,
in fresh processes and in full groups, the answer ran {GROUPS} groups, and what lies above it was
tried: the next candidate, and others at random.

- **{len(sound)} of {len(findings)}** hold without exception.
- {len(answered)} have an answer; {len(lasting)} of these answers ran {GROUPS} groups. In
  {len(settled)} of them the allocator retried after the first group; in none that holds after group
  {SETTLED}.
- {len(bounded)} answers have a larger candidate. The next one fails in {len(next_refused)}.
- {len(refused)} of {len(above)} sizes tried above an answer fail.
- In {len(holes)} probes a size failed below the answer (a hole); in {len(thrashing)} a size ran
  only because the allocator kept flushing its cache.
- {len(findings) - len(answered)} questions have no answer: not even the smallest size fits.
- Probes took {trials[len(trials) // 2] if trials else 0} trials on the median and \
{trials[-1] if trials else 0} at the most.

Kinds: {kinds}. Optimizers: {updates}. Precisions: {precisions}. Allocator settings: {allocators}.
Cards: {cards}, with 2 GiB or more. {checkpointed} are checkpointed, {kept} keep a logical batch,
{replicas} have replicas.

| # | workload | logical batch | D | card | allocator | answer | trials | survived | above | |
|---|---|---|---|---|---|---|---|---|---|---|
{chr(10).join(_row(finding) for finding in findings)}

memfit {version("memfit")}, torch {version("torch")}; Python {platform.python_version()}.

Regenerate with

```
{command}
```
"""


def main() -> int:
    """Examine what the store does not have, and tell."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.survival",
        description="Put a probe's answers to random questions to the proof.",
    )
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--store", type=Path, metavar="FILE", help="where findings are kept")
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    asked = parser.parse_args()
    path = asked.store or Path("build") / f"survival-{asked.seed}.jsonl"
    findings = run([draw(asked.seed, index) for index in range(asked.count)], Store(path))
    wrong = [finding for finding in findings if finding.faults]
    for finding in wrong:
        print(f"#{finding.question.index}: {'; '.join(finding.faults)}\n  {finding.question}")
    print(f"{len(findings) - len(wrong)} of {len(findings)} hold")
    if asked.markdown is not None:
        command = shlex.join(["python", "-m", "tests.benchmarks.survival", *sys.argv[1:]])
        asked.markdown.write_text(as_markdown(findings, command=command))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
