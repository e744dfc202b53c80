"""Workloads measured for a gate, several at a time, and the baseline that an update writes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from memfit.baseline import (
    DEFAULT_FILE,
    Baseline,
    Entry,
    Setting,
    read_baseline,
    write_baseline,
    writing,
)
from memfit.devices.cores import cores
from memfit.devices.select import DEFAULT_HEADROOM
from memfit.errors import CannotJudge, Interrupted, MemfitError, NothingFits, UsageError
from memfit.explain import workload_error
from memfit.gate import Comparison, GateResult, Limits, compare, differences_of
from memfit.measure import Bench, check_setting
from memfit.records import Precision, ProbeResult, TrialResult, Verdict, from_json
from memfit.trial.lane import Lane
from memfit.virtual import DEFAULT_CARD, find_card
from memfit.workload import split_target

DEFAULT_MICROBATCH, DEFAULT_STEPS = 4, 2
"""The group of a workload that nobody gave a size: small, and with accumulation in it."""

Tell = Callable[[str], None]
Job = TypeVar("Job")
Done = TypeVar("Done")


@dataclass(frozen=True, slots=True, kw_only=True)
class GateRequest:
    """What is to be checked or updated, in the user's words."""

    targets: tuple[str, ...] = ()
    baseline: Path = Path(DEFAULT_FILE)
    limits: Limits = field(default_factory=Limits)
    fits_on: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NewSettings:
    """How `--update` runs workloads; None leaves it as the baseline has it, or the default."""

    parameters: dict[str, str] = field(default_factory=dict)
    device: str | None = None
    precision: Precision | None = None
    microbatch: int | None = None
    accumulation_steps: int | None = None
    replicas: int | None = None
    clip_norm: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Updated:
    """What an update did with one workload."""

    before: Entry | None
    now: Entry


def check(request: GateRequest, tell: Tell) -> GateResult:
    """Compare workloads with their baseline; nothing is written.

    Raises:
        CannotJudge: When there is no baseline.
        UsageError: When the baseline cannot be read, or a card or a target is none.
        Interrupted: When the user stops it.
    """
    from memfit import __version__  # noqa: PLC0415

    cards = _cards(request.fits_on)
    baseline = read_baseline(request.baseline)
    chosen, missing = _chosen(baseline, request.targets)
    if not chosen and not missing:
        raise CannotJudge(
            f"{request.baseline} holds no workload",
            hint=f"`memfit gate --update TARGET --baseline {request.baseline}` adds one",
        )

    def judge(entry: Entry, lane: Lane) -> Comparison:
        return _judge(entry, cards, request.limits, tell, lane)

    found = [*_each(judge, chosen), *(_missing(target, baseline) for target in missing)]
    return GateResult(
        memfit=__version__,
        baseline=str(request.baseline),
        limits=request.limits,
        passed=not any(comparison.fails for comparison in found),
        workloads=tuple(found),
    )


def _cards(words: Sequence[str]) -> tuple[str, ...]:
    slugs = []
    for word in words:
        slug = find_card(word).slug
        if slug in slugs:
            raise UsageError(f"--fits-on names {slug} twice", hint="name each card once")
        slugs.append(slug)
    return tuple(slugs)


def _chosen(baseline: Baseline, targets: Sequence[str]) -> tuple[list[Entry], list[str]]:
    """Return the entries of these targets, or all of them, and the targets without one."""
    if not targets:
        return list(baseline.entries.values()), []
    chosen, missing = [], []
    for target in dict.fromkeys(targets):
        split_target(target)
        found = [e for e in baseline.entries.values() if e.setting.target == target]
        chosen += found
        if not found:
            missing.append(target)
    return chosen, missing


def _missing(target: str, baseline: Baseline) -> Comparison:
    known = sorted({e.setting.target for e in baseline.entries.values()})
    return Comparison(
        name=target,
        target=target,
        mark="x",
        verdict="not comparable",
        source=None,
        reasons=(
            f"the baseline has no entry for it; it has {', '.join(known) or 'none'}. "
            "`memfit gate --update` adds it",
        ),
    )


def _judge(
    before: Entry, cards: tuple[str, ...], limits: Limits, tell: Tell, lane: Lane
) -> Comparison:
    """Measure one workload as its baseline did, and compare."""
    setting = before.setting
    failed = Comparison(
        name=setting.name,
        target=setting.target,
        mark="!",
        verdict="failed",
        source=before.source,
        microbatch=setting.microbatch,
        accumulation_steps=setting.accumulation_steps,
    )
    try:
        with Bench(setting.target, setting.parameters, setting.device, lane=lane) as bench:
            trial = bench.run(setting)
            if trial.verdict is not Verdict.FITS:
                return _broken(failed, trial)
            now = bench.entry(setting, trial)
            if now.devices != before.devices and not differences_of(before, now):
                now = bench.entry(setting, bench.explain(setting, trial))
        now = replace(now, fits_on=_fits_on(setting, {*cards, *before.fits_on}, lane))
    except (UsageError, CannotJudge) as error:
        words = error.message + (f"; {error.hint}" if error.hint else "")
        return replace(failed, mark="x", verdict="not comparable", reasons=(words,))
    except MemfitError as error:
        details = f"\n{error.details}" if error.details else ""
        return replace(failed, verdict="error", reasons=(error.message + details,))
    comparison = compare(before, now, limits)
    tell(f"{comparison.mark} {comparison.name}: {comparison.verdict}")
    return comparison


def _broken(failed: Comparison, trial: TrialResult) -> Comparison:
    if trial.verdict.limits_size:
        at = (trial.evidence.phase or "").replace("_", " ")
        return replace(
            failed,
            reasons=(f"it does not run any more, out of memory in {at}: {trial.evidence.text}",),
        )
    error = workload_error(trial, failed.target, kept=None, earlier=())
    details = f"\n{error.details}" if error.details else ""
    return replace(failed, verdict="error", reasons=(error.message + details,))


def _fits_on(setting: Setting, cards: set[str], lane: Lane) -> dict[str, bool]:
    """Try the same group on other cards, with the headroom that a probe keeps free there."""
    found = {}
    for card in sorted(cards):
        with Bench(
            setting.target, setting.parameters, card, headroom=DEFAULT_HEADROOM, lane=lane
        ) as bench:
            trial = bench.run(setting)
        if trial.verdict is not Verdict.FITS and not trial.verdict.limits_size:
            raise workload_error(trial, setting.target, kept=None, earlier=())
        found[card] = trial.verdict is Verdict.FITS
    return found


# -- updating --------------------------------------------------------------------------------


def update(request: GateRequest, new: NewSettings, tell: Tell) -> list[Updated]:
    """Measure workloads anew and write the baseline, all of it or nothing.

    Returns:
        Every workload that was measured, by its name.

    Raises:
        NothingFits: When a group does not fit on its device.
        WorkloadError: When a workload fails.
        UsageError: When the words make no sense, or another update is at work.
        Interrupted: When the user stops it; nothing is written.
    """
    cards = _cards(request.fits_on)
    with writing(request.baseline):
        exists = request.baseline.exists()
        baseline = read_baseline(request.baseline) if exists else Baseline()
        settings = _settings(baseline, request.targets, new, tell)
        for setting in settings:
            check_setting(setting)

        def measure(setting: Setting, lane: Lane) -> Updated:
            before = baseline.entries.get(setting.name)
            kept = set(before.fits_on) if before else set()
            return Updated(before=before, now=_measured(setting, {*cards, *kept}, tell, lane))

        updated = _each(measure, settings)
        entries = {**baseline.entries, **{u.now.setting.name: u.now for u in updated}}
        write_baseline(request.baseline, Baseline(entries=entries))
    return updated


def _settings(
    baseline: Baseline, targets: Sequence[str], new: NewSettings, tell: Tell
) -> list[Setting]:
    """Say how each workload is to be run."""
    if not targets:
        if not baseline.entries:
            raise UsageError("there is no workload to measure", hint="name one: file.py")
        return [_changed(e.setting, new) for e in baseline.entries.values()]
    found: dict[str, Setting] = {}
    for target in targets:
        if target.endswith(".json"):
            settings = [_changed(_from_probe(Path(target)), new)]
        else:
            split_target(target)
            known = [e.setting for e in baseline.entries.values() if e.setting.target == target]
            alike = [s for s in known if _changed(s, new).name == s.name]
            settings = [_changed(s, new) for s in alike] or [_fresh(target, new, tell)]
        found.update({s.name: s for s in settings})
    return [found[name] for name in sorted(found)]


def _changed(setting: Setting, new: NewSettings) -> Setting:
    parameters = {**setting.parameters, **new.parameters}
    return replace(
        setting,
        parameters=parameters,
        device=new.device or setting.device,
        precision=new.precision or setting.precision,
        microbatch=setting.microbatch if new.microbatch is None else new.microbatch,
        accumulation_steps=setting.accumulation_steps
        if new.accumulation_steps is None
        else new.accumulation_steps,
        replicas=setting.replicas if new.replicas is None else new.replicas,
        clip_norm=setting.clip_norm if new.clip_norm is None else new.clip_norm,
    )


def _fresh(target: str, new: NewSettings, tell: Tell) -> Setting:
    """Run a workload that the baseline does not know with what was given, and say the rest."""
    assumed = []
    if new.device is None:
        assumed.append(f"a virtual {DEFAULT_CARD} (--device)")
    if new.microbatch is None:
        assumed.append(f"microbatch {DEFAULT_MICROBATCH} (--microbatch)")
    if new.accumulation_steps is None:
        assumed.append(f"{DEFAULT_STEPS} accumulation steps (--accumulation-steps)")
    if assumed:
        tell(f"{target} is new to the baseline: taking {', '.join(assumed)}")
    blank = Setting(
        target=target,
        device=DEFAULT_CARD,
        microbatch=DEFAULT_MICROBATCH,
        accumulation_steps=DEFAULT_STEPS,
    )
    return _changed(blank, new)


def _from_probe(path: Path) -> Setting:
    """Take the setting of a probe's answer."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from None
    result = from_json(data, ProbeResult, origin=str(path))
    return Setting(
        target=result.spec.target,
        parameters={key: str(value) for key, value in result.spec.parameters.items()},
        device=result.spec.device.slug,
        precision=result.spec.precision,
        microbatch=result.split.microbatch,
        accumulation_steps=result.split.accumulation_steps,
        replicas=result.split.replicas,
        clip_norm=result.spec.clip_norm,
    )


def _measured(setting: Setting, cards: set[str], tell: Tell, lane: Lane) -> Entry:
    with Bench(setting.target, setting.parameters, setting.device, lane=lane) as bench:
        trial = bench.run(setting)
        if trial.verdict.limits_size:
            raise NothingFits(
                f"{setting.target}: {setting.accumulation_steps} microbatches of "
                f"{setting.microbatch} do not fit on {bench.device.name}: "
                f"{trial.evidence.text}",
                hint="give a smaller --microbatch or another --device",
            )
        if trial.verdict is not Verdict.FITS:
            raise workload_error(trial, setting.target, kept=None, earlier=())
        entry = bench.entry(setting, bench.explain(setting, trial))
    entry = replace(entry, fits_on=_fits_on(setting, cards, lane))
    tell(f"measured {setting.name}")
    return entry


# -- several at a time -----------------------------------------------------------------------


def _each(work: Callable[[Job, Lane], Done], jobs: Sequence[Job]) -> list[Done]:
    """Do all jobs, as many at a time as there are cores, and return what they gave in order."""
    stop = threading.Event()

    def do(job: Job) -> Done:
        lane = Lane(stop)
        try:
            return work(job, lane)
        finally:
            lane.close()

    with ThreadPoolExecutor(max_workers=cores()) as pool:
        futures: list[Future[Done]] = [pool.submit(do, job) for job in jobs]
        try:
            return [future.result() for future in futures]
        except BaseException as error:
            stop.set()
            for future in futures:
                future.cancel()
            if isinstance(error, KeyboardInterrupt):
                raise Interrupted("interrupted; nothing was written") from None
            raise
