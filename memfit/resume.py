"""Whether a saved probe asked the same question, so that its trials may be used. Pure."""

from __future__ import annotations

import dataclasses

from memfit.nothing import NothingFound
from memfit.records import (
    DeviceKind,
    DeviceSpec,
    Environment,
    ProbeProgress,
    ProbeResult,
    ProbeSpec,
    Source,
    WorkloadInfo,
)

_HOW_LONG = ("max_trials", "time_budget_s", "trial_timeout_s")
"""Fields of a ProbeSpec that say how long to search, and so are no part of the question."""


def continued(saved: ProbeSpec, asked: ProbeSpec) -> ProbeSpec:
    """Return the saved question, with how long to search taken from the one asked now."""
    return dataclasses.replace(saved, **{name: getattr(asked, name) for name in _HOW_LONG})


def differences_of(
    saved: ProbeProgress | ProbeResult | NothingFound,
    *,
    spec: ProbeSpec,
    workload: WorkloadInfo,
    environment: Environment,
) -> list[str]:
    """What a saved probe was asked differently, in words; empty when it was the same question."""
    found = []
    for name in (f.name for f in dataclasses.fields(ProbeSpec)):
        if name in _HOW_LONG or name == "parameters":
            continue
        mine, other = getattr(spec, name), getattr(saved.spec, name)
        if name == "device":
            mine, other = _asked_of(mine), _asked_of(other)
        elif name == "allocator" and _went_on(saved):
            continue  # both settings were asked for, and which one answers was no part of it
        if mine != other:
            found.append(f"{name.replace('_', ' ')} was {other}, is {mine}")
    now, then = workload.parameters, saved.workload.parameters
    found += [
        f"{name} was {then.get(name)}, is {now.get(name)}"
        for name in dict.fromkeys((*now, *then))
        if now.get(name) != then.get(name)
    ]
    found += changed_since(saved.workload, saved.environment, workload, environment)
    return found


def changed_since(
    saved: WorkloadInfo, then: Environment, workload: WorkloadInfo, environment: Environment
) -> list[str]:
    """What has changed beside the words of a saved question: its code, or torch."""
    found = []
    if saved.sha256 != workload.sha256:
        found.append(f"{workload.target} was changed, or a module that it imports")
    if _figures(then) != _figures(environment):
        found.append("torch or its settings are others")
    return found


def answer_words(saved: ProbeResult | NothingFound) -> str:
    """Say what a finished probe answered, and when."""
    day = saved.created.partition("T")[0]
    if isinstance(saved, NothingFound):
        return f"this question was answered on {day}: {saved.message}"
    steps = saved.split.accumulation_steps
    told = (
        f"this question was answered on {day}: microbatch {saved.split.microbatch} with {steps} "
        f"accumulation step{'' if steps == 1 else 's'}"
    )
    if saved.source is Source.VIRTUAL:
        told += f" on a virtual {saved.spec.device.name}"
    if saved.certificate.ceiling == "budget":
        told += f", where the search ended after {saved.spec.max_trials} trials"
    if saved.certificate.ceiling == "time":
        told += f", where the search ended after {saved.spec.time_budget_s:g} s"
    return told


def _went_on(saved: ProbeProgress | ProbeResult | NothingFound) -> bool:
    return any(trial.spec.allocator is None for trial in saved.other_trials)


def _asked_of(device: DeviceSpec) -> str:
    """The part of a device that is the user's question, without what the machine has free today."""
    if device.kind is DeviceKind.CPU and device.memory_limit_bytes is None:
        return "cpu"
    return f"{device.slug} limited to {device.limit_bytes} bytes"


def _figures(environment: Environment) -> object:
    return (environment.torch, environment.cuda, environment.cudnn, environment.variables)
