"""A probe: the search over trials, from the question to a certified answer."""

from __future__ import annotations

import datetime
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from memfit.afterwards import UNLIMITED_BYTES, Afterwards, may_be_fragmented
from memfit.allocator import EXPANDABLE, AllocatorChoice
from memfit.batch import Candidates, candidates, poor_split_note
from memfit.composition import with_ledger, with_near_ledger
from memfit.devices.select import choose
from memfit.errors import (
    CannotJudge,
    Interrupted,
    MemfitError,
    NothingFits,
    UsageError,
)
from memfit.explain import (
    disagreements,
    last_group_of,
    limits_of,
    nothing_fits,
    noticed,
    workload_error,
)
from memfit.folder import REPORT, ProbeFolder, default_folder
from memfit.foresight import foresee
from memfit.nothing import NothingFound
from memfit.outcomes import Outcome, unrepeated
from memfit.question import (
    MOST_TRIALS,
    ProbeListener,
    ProbeRequest,
    ask_cuda,
    check_request,
    describe_device,
    share_of,
    worker_environment,
)
from memfit.records import (
    DeviceKind,
    DeviceSpec,
    ProbeProgress,
    ProbeResult,
    ProbeSpec,
    Source,
    TrialResult,
    TrialSpec,
    Tuned,
    Verdict,
)
from memfit.resume import answer_words, continued, differences_of
from memfit.search import (
    Ask,
    Decision,
    Exhausted,
    Found,
    NoFit,
    decide,
    expected_room,
    outcomes_of,
)
from memfit.story import tell
from memfit.trial.lane import Lane
from memfit.trial.pool import Following, TrialPool, nothing
from memfit.trial.protocol import Ready
from memfit.trial.runner import TrialRunner
from memfit.verify.store import find as find_verification

LEAST_GROUPS = 2
"""Groups of a search trial: one that makes the optimizer's state, and one that runs with it."""
_LOAD_TIMEOUT_S = 900.0
"""Longest time that importing torch and the user's code may take."""
_LOAD_LEAST_S = 60.0
"""What it may take where trials have to be shorter."""
_LEDGER_MICROBATCHES = 3
"""Microbatches of a group in which allocations are noted; further ones are nearly always alike, and
noting takes several times as long as running."""
_LEDGER_SHORT = (LEAST_GROUPS, _LEDGER_MICROBATCHES)
_LEDGER_WHOLE = 16
"""Longest group that is noted as a whole where fewer microbatches have other peaks."""


def run_probe(
    request: ProbeRequest, listener: ProbeListener, *, lane: Lane | None = None
) -> tuple[ProbeResult, ProbeFolder]:
    """Answer a question with a certified microbatch.

    Args:
        request: The question.
        listener: Told what happens.
        lane: Keeps the process that imports the workload for the next probe of it, and may stop
            this one.

    Returns:
        The answer, already saved as `memfit.json`, and the folder that holds it.

    Raises:
        UsageError: When the question is wrong.
        Unfit: When the smallest microbatch does not fit; that is kept as the answer.
        WorkloadError: When the user's code fails.
        CannotJudge: When this machine cannot answer, or the answer cannot be written.
        Interrupted: When the user stops it; finished trials are kept.
    """
    started = time.monotonic()
    check_request(request)
    sizes = candidates(
        logical_batch=request.logical_batch,
        replicas=request.replicas,
        policy=request.policy,
        min_microbatch=request.min_microbatch,
        max_microbatch=request.max_microbatch,
    )
    choice = choose(request.device)
    if choice.said:
        listener.chosen(choice.said)
    folder = ProbeFolder(request.out, force=request.force) if request.out else None
    # A real GPU is known only once CUDA was asked, in a child of the process that imports torch.
    device = None if choice.kind is DeviceKind.CUDA else describe_device(request, choice, gpu=None)
    environment = {**worker_environment(choice, device), **request.environment}
    with TrialRunner(
        request.target,
        request.parameters,
        environment=environment,
        load_timeout_s=_load_timeout(request.trial_timeout_s),
        on_mark=listener.progressed,
        lane=lane,
    ) as runner:
        try:
            listener.importing(request.target)
            ready = runner.open()
            if device is None:
                device = describe_device(request, choice, gpu=ask_cuda(runner))
            folder = folder or ProbeFolder(
                default_folder(
                    ready.workload.name, device.slug, request.precision, request.parameters
                ),
                force=request.force,
            )
            beside = request.side_by_side and device.kind is DeviceKind.VIRTUAL
            alone = lane is not None or request.time_budget_s is not None
            with TrialPool(runner, side_by_side=beside and not alone) as pool:
                probe = _Probe(request, listener, pool, ready, device, folder, sizes, started)
                return probe.run(), folder
        except KeyboardInterrupt:
            runner.close()
            kept = folder is not None and folder.unfinished() is not None
            raise Interrupted(
                "interrupted",
                hint=f"finished trials are kept in {folder.path}: run the same command to go on"
                if kept and folder
                else None,
            ) from None
        finally:
            if folder is not None:
                folder.close()


def _load_timeout(trial_timeout_s: float | None) -> float:
    """Importing may take as long as a trial, but torch has to be imported whatever that is."""
    return min(_LOAD_TIMEOUT_S, max(trial_timeout_s or math.inf, _LOAD_LEAST_S))


class _Probe:
    """One probe as it runs."""

    def __init__(
        self,
        request: ProbeRequest,
        listener: ProbeListener,
        pool: TrialPool,
        ready: Ready,
        device: DeviceSpec,
        folder: ProbeFolder,
        sizes: Candidates,
        started: float,
    ) -> None:
        self._request = request
        self._listener = listener
        self._pool = pool
        self._workload = ready.workload
        self._environment = ready.environment
        self._folder = folder
        self._sizes = sizes
        self._trials: list[TrialResult] = []
        self._other_trials: list[TrialResult] = []
        """Those of a search that found that nothing fits with the allocator's own settings."""
        self._started = started
        self._budget_ended_a_trial = False
        chosen = request.allocator
        self._tries_both = chosen is AllocatorChoice.BOTH or (
            chosen is AllocatorChoice.AUTO and device.kind is DeviceKind.VIRTUAL
        )
        self._afterwards = Afterwards(
            run=pool.run, listener=listener, time_is_up=lambda: self._time_is_up
        )
        self._spec = ProbeSpec(
            target=request.target,
            parameters=dict(request.parameters),
            device=device,
            logical_batch=request.logical_batch,
            replicas=request.replicas,
            policy=request.policy,
            precision=request.precision,
            clip_norm=request.clip_norm,
            group_microbatches=request.group_microbatches,
            groups=request.groups,
            min_microbatch=request.min_microbatch,
            max_microbatch=request.max_microbatch,
            max_trials=request.max_trials or MOST_TRIALS[device.kind],
            time_budget_s=request.time_budget_s,
            trial_timeout_s=request.trial_timeout_s,
            seed=request.seed,
            data_dependent=share_of(request.data_dependent),
            resumed=request.resumed,
            evaluate=request.evaluate,
            allocator=EXPANDABLE if chosen is AllocatorChoice.EXPANDABLE else None,
        )

    def run(self) -> ProbeResult:
        """Search until there is a certificate, or until the time is up and there is an answer."""
        self._refuse_to_ask_again()
        self._resume()
        self._listener.loaded(self._workload, self._spec.device)
        if self._trials:
            self._listener.resumed(len(self._trials))
        while True:
            doubtful = unrepeated(self._trials)
            if doubtful is not None and self._may_repeat:
                self._repeat(doubtful)
                continue
            decision = self._decide(self._most_outcomes)
            if isinstance(decision, Ask) and self._time_is_up:
                decision = self._decide_in_haste(decision)
            match decision:
                case Ask():
                    self._run(self._asked_for(decision), partial(self._foreseen, decision))
                case Found():
                    return self._answer(decision)
                case NoFit() if self._may_fit_otherwise() and self._trials_left:
                    self._listener.warned(
                        "nothing fits with the allocator's default settings; the search goes on "
                        f"with {EXPANDABLE}"
                    )
                    self._spec = replace(self._spec, allocator=EXPANDABLE)
                    self._other_trials = self._trials
                    self._trials = []
                case NoFit():
                    raise self._nothing_fits(decision)
                case Exhausted():
                    raise CannotJudge(
                        "no size could be confirmed by full groups in "
                        f"{self._spent} trial{'' if self._spent == 1 else 's'}",
                        hint=f"raise --max-trials above {self._spec.max_trials} "
                        "and run the same command again",
                    )

    @property
    def _spent(self) -> int:
        """Trials that looked for a size, with whichever setting of the allocator."""
        return len(self._other_trials) + len(self._trials)

    @property
    def _trials_left(self) -> int:
        return max(self._spec.max_trials - self._spent, 0)

    @property
    def _answered(self) -> bool:
        """Whether a size is confirmed already, so that the search could end here."""
        return isinstance(self._decide(len(outcomes_of(self._trials))), Found)

    @property
    def _may_repeat(self) -> bool:
        """Whether a trial is left to repeat one; the last is kept to confirm an answer."""
        kept = 0 if self._answered else 1
        return self._trials_left > kept and not self._budget_ended_a_trial

    @property
    def _most_outcomes(self) -> int:
        """Outcomes at which the search ends: a doubtful trial is spent as well, and is none."""
        return len(outcomes_of(self._trials)) + self._trials_left

    def _decide(self, max_trials: int, outcomes: Sequence[Outcome] | None = None) -> Decision:
        return decide(
            self._sizes,
            outcomes_of(self._trials) if outcomes is None else outcomes,
            limit_bytes=self._spec.device.limit_bytes,
            max_trials=max_trials,
            group_microbatches=self._spec.group_microbatches,
        )

    def _may_fit_otherwise(self) -> bool:
        return self._tries_both and may_be_fragmented(self._trials, self._environment)

    # -- the time budget ---------------------------------------------------------------------

    @property
    def _time_left_s(self) -> float:
        budget = self._spec.time_budget_s
        return math.inf if budget is None else self._started + budget - time.monotonic()

    @property
    def _time_is_up(self) -> bool:
        return self._budget_ended_a_trial or self._time_left_s <= 0

    def _decide_in_haste(self, ask: Ask) -> Decision:
        """Answer with what is known; without an answer, go on until there is one."""
        spent = len(outcomes_of(self._trials))
        known = self._decide(spent)
        if isinstance(known, Found):
            return Found(certificate=replace(known.certificate, ceiling="time"), notes=known.notes)
        last = self._decide(spent + 1)
        return last if isinstance(last, Ask) and last.purpose == "confirm" else ask

    # -- trials ------------------------------------------------------------------------------

    def _asked_for(self, ask: Ask) -> TrialSpec:
        steps = self._sizes.accumulation_steps(ask.microbatch)
        short = min(self._spec.group_microbatches, steps)
        return self._trial_spec(
            purpose=ask.purpose,
            reason=ask.reason,
            microbatch=ask.microbatch,
            group_microbatches=steps if ask.purpose == "confirm" else short,
        )

    def _repeat(self, doubtful: TrialResult) -> None:
        """Run a trial again whose verdict has other explanations, before it counts."""
        index = doubtful.spec.index
        self._run(
            replace(
                doubtful.spec,
                index=self._spent + 1,
                repeats=index,
                reason=f"trial {index} once more: {doubtful.evidence.rule} has other causes too",
            )
        )

    def _foreseen(self, ask: Ask, ended: Sequence[TrialResult]) -> Iterator[TrialSpec]:
        """Foresee the trials that follow one that runs, with those that have ended ahead of it."""
        ahead = {
            (t.spec.split.microbatch, t.spec.purpose): t
            for t in ended
            if not t.spec.record_ledger and not t.evidence.doubtful
        }
        following = foresee(
            self._sizes,
            outcomes_of(self._trials),
            ask,
            ended={question: Outcome.of(trial) for question, trial in ahead.items()},
            limit_bytes=self._spec.device.limit_bytes,
            group_microbatches=self._spec.group_microbatches,
            decide=partial(self._decide, self._most_outcomes),
        )
        asked = [self._asked_for(each) for each in (ask, *following) if isinstance(each, Ask)]
        known = (*(trial.spec for trial in (*self._trials, *ahead.values())), *asked)
        specs = {spec.split.microbatch: spec for spec in known}
        for decision in following:
            if isinstance(decision, Ask):
                yield self._asked_for(decision)
            elif self._tells_by_block:
                yield _noting(specs[decision.certificate.microbatch], *_LEDGER_SHORT)

    def _run(self, spec: TrialSpec, following: Following = nothing) -> None:
        """Run one trial; keep what says something about its size, and stop at what does not."""
        self._listener.asked(spec)
        haste = self._answered and self._time_left_s < (spec.timeout_s or math.inf)
        timeout_s = max(self._time_left_s, 0.1) if haste else spec.timeout_s
        result = self._pool.run(replace(spec, timeout_s=timeout_s), following)
        if haste and result.verdict is Verdict.TIMEOUT:
            self._budget_ended_a_trial = True
            self._listener.warned(
                f"the time budget of {self._spec.time_budget_s:g} s ended the trial of "
                f"microbatch {spec.split.microbatch}"
            )
            return
        result = replace(result, spec=spec)
        says_something = result.verdict is Verdict.FITS or result.verdict.limits_size
        if says_something:
            self._trials.append(result)
            self._save()  # before it is told: what was seen to be finished is kept
        elif self._trials:  # beside what had finished; alone it would only be in the way
            self._save(stopped_by=result)
        self._listener.finished(result)
        if not says_something:
            raise workload_error(
                result,
                self._request.target,
                earlier=self._trials,
                kept=self._kept_words(),
                searched=True,
            )

    def _kept_words(self) -> str | None:
        if not self._trials:
            return None
        count = len(self._trials)
        trials = "1 finished trial is" if count == 1 else f"{count} finished trials are"
        return (
            f"{trials} kept in {self._folder.path}: "
            "the same command goes on from there; once the workload was changed, use --force"
        )

    def _trial_spec(
        self,
        *,
        purpose: str,
        reason: str,
        microbatch: int,
        group_microbatches: int,
        device: DeviceSpec | None = None,
    ) -> TrialSpec:
        split = self._sizes.split(microbatch)
        full = group_microbatches >= split.accumulation_steps
        return TrialSpec(
            index=self._spent + 1,
            purpose=purpose,  # type: ignore[arg-type]
            reason=reason,
            split=split,
            group_microbatches=group_microbatches,
            groups=self._spec.groups if full else LEAST_GROUPS,
            precision=self._spec.precision,
            clip_norm=self._spec.clip_norm,
            device=device or self._spec.device,
            seed=self._spec.seed,
            data_dependent=self._spec.data_dependent,
            resumed=self._spec.resumed,
            allocator=self._spec.allocator,
            timeout_s=self._spec.trial_timeout_s,
            record_timeline=full,
        )

    # -- saving and resuming -----------------------------------------------------------------

    def _save(self, *, stopped_by: TrialResult | None = None) -> None:
        progress = ProbeProgress(
            command=self._request.command,
            workload=self._workload,
            spec=self._spec if not self._tries_both else replace(self._spec, allocator=None),
            environment=self._environment,
            trials=tuple(self._trials),
            other_trials=tuple(self._other_trials),
            stopped_by=stopped_by,
        )
        try:
            self._folder.save_progress(progress)
        except CannotJudge as error:
            self._listener.warned(f"{error.message}; the search goes on, but cannot be resumed")

    def _differences(self, saved: ProbeProgress | ProbeResult | NothingFound) -> list[str]:
        """Say what a saved probe was asked differently."""
        return differences_of(
            saved, spec=self._spec, workload=self._workload, environment=self._environment
        )

    def _refuse_to_ask_again(self) -> None:
        """Never replace an answer that the folder holds; say to which question it is."""
        saved = self._folder.answered
        if saved is None:
            return
        differences = self._differences(saved)
        if differences:
            raise UsageError(
                f"{self._folder.path} holds the answer to another question: "
                f"{'; '.join(differences)}",
                hint="--out names another folder; --force replaces that answer",
            )
        raise UsageError(
            f"{answer_words(saved)} (see {self._folder.path / REPORT})",
            hint="--force asks it again and replaces the answer, --out keeps both",
        )

    def _resume(self) -> None:
        saved = self._folder.unfinished()
        if saved is None:
            return
        differences = self._differences(saved)
        if differences:
            raise UsageError(
                f"{self._folder.path} holds an unfinished probe of another question: "
                f"{'; '.join(differences)}",
                hint="--force starts again and drops its trials; --out names another folder",
            )
        self._spec = continued(saved.spec, self._spec)
        self._trials = list(saved.trials)
        self._other_trials = list(saved.other_trials)
        if self._trials:  # it may have gone on with another setting, once nothing fitted
            self._spec = replace(self._spec, allocator=self._trials[-1].spec.allocator)

    # -- the end -----------------------------------------------------------------------------

    def _answer(self, found: Found) -> ProbeResult:
        draft = self._draft(found)
        self._listener.decided(draft)
        answer = self._told_by_block(draft.answer)
        tuned, others = self._tuned(answer)
        index = self._spent + len(others) + 1
        result = replace(
            draft,
            other_trials=(*draft.other_trials, *others),
            limits=(*limits_of(self._spec), *answer.limits),
            trials=tuple(answer if t.spec.index == answer.spec.index else t for t in draft.trials),
            notes=(*draft.notes, *noticed(answer)),
            tuned=tuned,
            evaluation=self._afterwards.evaluation(answer, index=index)
            if self._spec.evaluate
            else None,
            steadiness=self._afterwards.steadiness(answer, index=index),
            verification=find_verification(self._workload),
            created=_now(),
            wall_s=time.monotonic() - self._started,
        )
        try:
            self._folder.save_result(result)
        except CannotJudge as error:
            raise UnsavedAnswer(result, error) from None
        return result

    def _draft(self, found: Found) -> ProbeResult:
        """Put the answer together, without what further trials tell of it."""
        certificate = found.certificate
        device = self._spec.device
        notes = [*found.notes, *disagreements(self._trials)]
        poor = poor_split_note(
            self._sizes,
            microbatch=certificate.microbatch,
            room=expected_room(
                self._sizes, outcomes_of(self._trials), limit_bytes=device.limit_bytes
            ),
        )
        if poor is not None:
            notes.append(f"{poor[0]}; {poor[1]}")
        return ProbeResult(
            created="",
            command=self._request.command,
            workload=self._workload,
            spec=self._spec,
            source=self._source,
            limits=(*limits_of(self._spec), *self._trial(certificate.trial).limits),
            split=self._sizes.split(certificate.microbatch),
            certificate=certificate,
            trials=tuple(
                t if t.spec.index == certificate.trial else replace(t, timeline=None)
                for t in self._trials
            ),
            other_trials=tuple(self._other_trials),
            story=tell(self._trials, certificate),
            environment=self._environment,
            loss_normalisation=(
                "each microbatch's mean loss counts by its share of the elements of the whole "
                "group on all replicas (D * n_i / N, with replicas averaged)"
            ),
            last_group=last_group_of(self._spec),
            notes=tuple(notes),
            wall_s=0.0,
        )

    def _told_by_block(self, answer: TrialResult) -> TrialResult:
        """Run the answer once more to see what its peak is made of, where there is time for it."""
        if not self._tells_by_block or self._time_is_up:
            return answer
        short = self._noted(answer, *_LEDGER_SHORT)
        told = with_ledger(answer, short)
        ran = (answer.groups_run, answer.spec.group_microbatches)
        if told is answer and short.ledger is not None and ran[1] <= _LEDGER_WHOLE:
            told = with_ledger(answer, self._noted(answer, *ran))
        return with_near_ledger(answer, short) if told is answer else told

    @property
    def _tells_by_block(self) -> bool:
        return self._request.by_block and self._spec.device.kind is not DeviceKind.CPU

    def _noted(self, answer: TrialResult, groups: int, microbatches: int) -> TrialResult:
        spec = _noting(answer.spec, groups, microbatches, timeout_s=10 * answer.wall_s + 30)
        self._listener.asked(spec)
        return self._pool.run(spec)

    def _tuned(self, answer: TrialResult) -> tuple[Tuned | None, tuple[TrialResult, ...]]:
        """Look for a larger microbatch with expandable segments, where that was asked for."""
        if not self._tries_both or self._spec.allocator is not None:
            return None, ()
        if not may_be_fragmented(self._trials, self._environment):
            return None, ()
        return self._afterwards.tuned(
            self._sizes,
            self._trials,
            answer,
            environment=self._environment,
            group_microbatches=self._spec.group_microbatches,
            max_trials=self._trials_left,
            make=self._asked_for,
        )

    def _trial(self, index: int) -> TrialResult:
        return next(t for t in self._trials if t.spec.index == index)

    def _nothing_fits(self, decision: NoFit) -> Unfit:
        """Say what a microbatch that does not fit is made of, and keep it as the answer."""
        device = self._spec.device
        trial = self._trial(decision.trial)
        shown, diagnosis = trial, None
        if device.kind is DeviceKind.VIRTUAL:
            spec = self._trial_spec(
                purpose="diagnose",
                reason="what the smallest microbatch would need without a limit",
                microbatch=decision.microbatch,
                group_microbatches=trial.spec.group_microbatches,
                device=replace(device, limit_bytes=UNLIMITED_BYTES),
            )
            diagnosis = self._pool.run(spec)
            if diagnosis.verdict is Verdict.FITS:
                shown = diagnosis
        said = nothing_fits(
            device,
            decision.microbatch,
            trial,
            shown,
            whole=shown is not trial,
            least=self._spec.min_microbatch,
            untried=EXPANDABLE if self._may_fit_otherwise() else None,
        )
        record = NothingFound(
            created=_now(),
            command=self._request.command,
            workload=self._workload,
            spec=self._spec,
            source=self._source,
            limits=limits_of(self._spec),
            message=said.message,
            hint=said.hint,
            details=said.details,
            trials=tuple(replace(t, timeline=None) for t in self._trials),
            other_trials=tuple(replace(t, timeline=None) for t in self._other_trials),
            diagnosis=None if diagnosis is None else replace(diagnosis, timeline=None),
            environment=self._environment,
            wall_s=time.monotonic() - self._started,
        )
        try:
            self._folder.save_result(record)
        except CannotJudge as error:
            self._listener.warned(f"{error.message}; the trials are not kept")
            return Unfit(record, None)
        return Unfit(record, self._folder)

    @property
    def _source(self) -> Source:
        virtual = self._spec.device.kind is DeviceKind.VIRTUAL
        return Source.VIRTUAL if virtual else Source.MEASURED


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _noting(
    spec: TrialSpec, groups: int, microbatches: int, *, timeout_s: float | None = None
) -> TrialSpec:
    """Return a trial like another one that notes every allocation."""
    return replace(
        spec,
        reason="what its peak is made of",
        groups=groups,
        group_microbatches=min(spec.group_microbatches, microbatches),
        record_timeline=False,
        record_ledger=True,
        timeout_s=timeout_s,
    )


class Unfit(NothingFits):
    """Nothing fits; `record` tells of it, and is saved in `folder` unless that is None."""

    def __init__(self, record: NothingFound, folder: ProbeFolder | None) -> None:
        """Say what the record says."""
        super().__init__(record.message, hint=record.hint, details=record.details)
        self.record = record
        self.folder = folder


class UnsavedAnswer(CannotJudge):
    """There is an answer, but it cannot be written; `result` holds it."""

    def __init__(self, result: ProbeResult, cause: MemfitError) -> None:
        """Keep the answer with the reason for which it was not written."""
        super().__init__(cause.message, hint=cause.hint)
        self.result = result


__all__ = [
    "ProbeListener",
    "ProbeRequest",
    "Unfit",
    "UnsavedAnswer",
    "run_probe",
    "share_of",
    "worker_environment",
]
