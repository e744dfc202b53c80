"""One workload at one fixed size on one device: its peaks, and what they are made of."""

from __future__ import annotations

from dataclasses import replace
from typing import Self

from memfit.baseline import DevicePeaks, Entry, Fingerprint, Phase, PhasePeaks, Setting
from memfit.composition import with_ledger
from memfit.devices.select import choose, describe
from memfit.errors import UsageError
from memfit.question import ask_cuda, worker_environment
from memfit.records import (
    DeviceKind,
    DeviceMemory,
    DeviceSpec,
    Source,
    Split,
    TrialResult,
    TrialSpec,
)
from memfit.trial.lane import Lane
from memfit.trial.protocol import Ready
from memfit.trial.runner import TrialRunner

_LOAD_TIMEOUT_S = 900.0
_ALLOCATION = (
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
    "CUBLAS_WORKSPACE_CONFIG",
    "TORCH_CUDNN_V8_API_DISABLED",
)
"""Variables that change how device memory is allocated."""
_PHASES: tuple[Phase, ...] = Phase.__args__  # type: ignore[attr-defined]


class Bench:
    """A workload that is imported and ready to be measured at any size on one device."""

    def __init__(
        self,
        target: str,
        parameters: dict[str, str],
        device: str,
        *,
        headroom: str = "0%",
        lane: Lane | None = None,
        timeout_s: float | None = 1800.0,
    ) -> None:
        """Choose the device; `open` imports the workload.

        Args:
            target: The user's file or module.
            parameters: Parameters of the workload to set.
            device: `cuda`, `cpu`, or a card to imitate.
            headroom: What is kept free of the device, in bytes or percent.
            lane: Keeps the process that imports the workload for the next bench of it.
            timeout_s: Longest time that one trial may take.

        Raises:
            UsageError: When there is no such device.
            CannotJudge: When this machine does not have it.
        """
        self._headroom, self._timeout_s = headroom, timeout_s
        self._choice = choose(device)
        real = self._choice.kind is DeviceKind.CUDA
        self._device = None if real else self._describe(None)
        self.runner = TrialRunner(
            target,
            parameters,
            environment=worker_environment(self._choice, self._device),
            load_timeout_s=_LOAD_TIMEOUT_S,
            lane=lane,
        )
        self._ready: Ready | None = None

    def _describe(self, gpu: tuple[str, int, str] | None) -> DeviceSpec:
        return describe(self._choice, memory_limit=None, headroom=self._headroom, gpu=gpu)

    def __enter__(self) -> Self:
        """Import the workload."""
        try:
            self._ready = self.runner.open()
            if self._device is None:
                self._device = self._describe(ask_cuda(self.runner))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        """End every process, but for one that a lane keeps."""
        self.runner.close()

    @property
    def device(self) -> DeviceSpec:
        """The device; of a real GPU known once the bench is open."""
        assert self._device is not None
        return self._device

    def run(self, setting: Setting) -> TrialResult:
        """Run full groups once, as they are measured."""
        return self.runner.run(self._spec(setting))

    def explain(self, setting: Setting, measured: TrialResult) -> TrialResult:
        """Run them once more, and give the measured trial the ledger of its peaks."""
        if self.device.kind is DeviceKind.CPU:
            return measured
        spec = replace(self._spec(setting), groups=measured.groups_run, record_ledger=True)
        noted = self.runner.run(spec)
        return with_ledger(measured, noted)

    def _spec(self, setting: Setting) -> TrialSpec:
        steps = setting.accumulation_steps
        return TrialSpec(
            index=1,
            purpose="confirm",
            split=Split(
                microbatch=setting.microbatch,
                accumulation_steps=steps,
                replicas=setting.replicas,
            ),
            group_microbatches=steps,
            precision=setting.precision,
            clip_norm=setting.clip_norm,
            device=self.device,
            timeout_s=self._timeout_s,
        )

    def entry(self, setting: Setting, trial: TrialResult) -> Entry:
        """Make of a trial that fits what a baseline keeps."""
        virtual = self.device.kind is DeviceKind.VIRTUAL
        return Entry(
            setting=setting,
            fingerprint=self._fingerprint(setting),
            source=Source.VIRTUAL if virtual else Source.MEASURED,
            devices=tuple(peaks_of(device) for device in trial.devices),
            ledger=trial.ledger,
        )

    def _fingerprint(self, setting: Setting) -> Fingerprint:
        assert self._ready is not None
        workload, environment = self._ready.workload, self._ready.environment
        on_cpu = self.device.kind is DeviceKind.CPU
        driver = environment.driver if self.device.kind is DeviceKind.CUDA else None
        return Fingerprint(
            workload=workload.name,
            parameters=dict(sorted(workload.parameters.items())),
            card="CPU" if on_cpu else self.device.name,
            card_bytes=None if on_cpu else self.device.total_bytes,
            torch=environment.torch,
            cuda=environment.cuda,
            cudnn=environment.cudnn,
            driver=driver.partition(".")[0] if driver else None,
            precision=setting.precision,
            clip_norm=setting.clip_norm,
            allocator={
                name: environment.variables[name]
                for name in _ALLOCATION
                if name in environment.variables
            },
            microbatch=setting.microbatch,
            accumulation_steps=setting.accumulation_steps,
            replicas=setting.replicas,
        )


def peaks_of(device: DeviceMemory) -> DevicePeaks:
    """Fold a device's phases over its groups."""
    phases = []
    for name in _PHASES:
        found = [p for p in device.phases if p.phase == name]
        if found:
            phases.append(
                PhasePeaks(
                    phase=name,
                    allocated_bytes=_most([p.peak_allocated_bytes for p in found]),
                    reserved_bytes=_most([p.peak_reserved_bytes for p in found]),
                    used_bytes=_most([p.device_used_bytes for p in found]),
                )
            )
    return DevicePeaks(rank=device.rank, device=device.device, phases=tuple(phases))


def _most(values: list[int | None]) -> int | None:
    return max((v for v in values if v is not None), default=None)


def check_setting(setting: Setting) -> None:
    """Refuse sizes that make no group; raises UsageError."""
    for name, value in (
        ("--microbatch", setting.microbatch),
        ("--accumulation-steps", setting.accumulation_steps),
        ("--replicas", setting.replicas),
    ):
        if value < 1:
            raise UsageError(f"{name} is {value}; it must be at least 1")
