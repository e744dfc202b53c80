"""Whether an unfinished probe asked the same question, so that its trials may be used. Pure."""

from __future__ import annotations

import dataclasses

from memfit.records import (
    DeviceKind,
    DeviceSpec,
    Environment,
    ProbeProgress,
    ProbeSpec,
    WorkloadInfo,
)

_HOW_LONG = ("max_trials", "time_budget_s", "trial_timeout_s")
"""Fields of a ProbeSpec that say how long to search, and so are no part of the question."""


def continued(saved: ProbeSpec, asked: ProbeSpec) -> ProbeSpec:
    """Return the saved question, with how long to search taken from the one asked now."""
    return dataclasses.replace(saved, **{name: getattr(asked, name) for name in _HOW_LONG})


def differences_of(
    saved: ProbeProgress, *, spec: ProbeSpec, workload: WorkloadInfo, environment: Environment
) -> list[str]:
    """What a saved probe was asked differently, in words; empty when it may be gone on with."""
    found = []
    for name in (f.name for f in dataclasses.fields(ProbeSpec)):
        if name in _HOW_LONG:
            continue
        mine, other = getattr(spec, name), getattr(saved.spec, name)
        if name == "device":
            mine, other = _asked_of(mine), _asked_of(other)
        if mine != other:
            found.append(f"{name.replace('_', ' ')} was {other}, is {mine}")
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


def _asked_of(device: DeviceSpec) -> str:
    """The part of a device that is the user's question, without what the machine has free today."""
    if device.kind is DeviceKind.CPU and device.memory_limit_bytes is None:
        return "cpu"
    return f"{device.slug} limited to {device.limit_bytes} bytes"


def _figures(environment: Environment) -> object:
    return (environment.torch, environment.cuda, environment.cudnn, environment.variables)
