"""Device memory as NVML reports it; every reading is None where NVML has nothing to say.

Sources disagree on whether the first version of the memory structure counts memory that the driver
reserves for itself (NVIDIA/gpu-operator#348, Cloud-Native nvml-wrapper#57), so memory is read as a
difference against a reading of the same version before the trial.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFacts:
    """One GPU as NVML knows it, before any CUDA context exists."""

    index: int
    name: str
    used_bytes: int
    total_bytes: int
    """NVML's total, a little above what CUDA reports."""


class Nvml:
    """A session with NVML. Where the library or a driver is missing, `available` is False."""

    def __init__(self) -> None:
        """Open NVML; failure to do so is an answer, not an error."""
        self._nvml: Any = None
        try:
            import pynvml  # noqa: PLC0415

            pynvml.nvmlInit()
        except Exception:  # noqa: BLE001 - no library, no driver, no permission: not available
            return
        self._nvml = pynvml

    @property
    def available(self) -> bool:
        """Whether NVML answers here."""
        return self._nvml is not None

    def gpus(self) -> tuple[GpuFacts, ...]:
        """List the GPUs of this machine; empty where there are none."""
        if self._nvml is None:
            return ()
        found = []
        for index in range(self._nvml.nvmlDeviceGetCount()):
            try:
                handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
                memory = self._nvml.nvmlDeviceGetMemoryInfo(handle)
                name = self._nvml.nvmlDeviceGetName(handle)
            except self._nvml.NVMLError:
                continue
            found.append(
                GpuFacts(
                    index=index,
                    name=name if isinstance(name, str) else name.decode(),
                    used_bytes=int(memory.used),
                    total_bytes=int(memory.total),
                )
            )
        return tuple(found)

    def driver_version(self) -> str | None:
        """Return the driver's version, such as `580.65.06`."""
        if self._nvml is None:
            return None
        version = self._nvml.nvmlSystemGetDriverVersion()
        return version if isinstance(version, str) else str(version.decode())

    def processes(self, uuid: str) -> tuple[tuple[int, int | None], ...]:
        """Other processes that compute on the GPU with this UUID, and the bytes each has in use.

        Bytes are None where the driver does not tell them, as inside most containers.
        """
        if self._nvml is None:
            return ()
        for form in (f"GPU-{uuid}", uuid):
            try:
                handle = self._nvml.nvmlDeviceGetHandleByUUID(form)
                found = self._nvml.nvmlDeviceGetComputeRunningProcesses(handle)
            except (self._nvml.NVMLError, TypeError):
                continue
            return tuple((int(p.pid), p.usedGpuMemory) for p in found if int(p.pid) != os.getpid())
        return ()

    def used_bytes(self, uuid: str) -> int | None:
        """Memory in use on the GPU with this UUID, by everybody; None where unknown.

        CUDA and NVML number GPUs differently, so the UUID is what they share.
        """
        if self._nvml is None:
            return None
        for form in (f"GPU-{uuid}", uuid):
            try:
                handle = self._nvml.nvmlDeviceGetHandleByUUID(form)
                return int(self._nvml.nvmlDeviceGetMemoryInfo(handle).used)
            except self._nvml.NVMLError:
                continue
            except TypeError:  # older bindings take bytes only
                continue
        return None
