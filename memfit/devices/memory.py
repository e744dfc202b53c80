"""The one place that reads memory while a trial runs; used in the worker process only."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from memfit.devices.nvml import Nvml
from memfit.errors import WorkloadError
from memfit.records import DeviceKind, DeviceSpec
from memfit.units import MIB

if TYPE_CHECKING:
    import torch

BLOCK_BYTES = 512
"""The CUDA caching allocator rounds every request up to a multiple of this (kMinBlockSize)."""


def least_request(segment_bytes: int) -> int:
    """Return the least that was asked of the allocator where it asks the device for a segment.

    It tells of a refusal by the segment: 2 MiB for requests of up to 1 MiB, 20 MiB for those under
    10 MiB, and larger ones rounded up to 2 MiB (`get_allocation_size` in CUDACachingAllocator).
    """
    if segment_bytes <= 2 * MIB:
        return BLOCK_BYTES
    if segment_bytes == 20 * MIB:
        return MIB + BLOCK_BYTES
    return segment_bytes - 2 * MIB + BLOCK_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One look at a device's memory; peaks are since the last reset."""

    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None
    allocated_bytes: int | None
    reserved_bytes: int | None
    taken_bytes: int | None
    """All that the allocator ever asked the device for, returned or not."""
    alloc_retries: int | None
    """Since the start of the process."""
    inactive_split_bytes: int | None
    allocator_events: int
    """Allocations and frees since the start of the process."""
    device_used_bytes: int | None
    outside_allocator_bytes: int | None


class MemoryReader(Protocol):
    """Reads one device's memory."""

    device: torch.device
    used_before_bytes: int | None
    device_used_source: Literal["nvml", "mem_get_info", "rss"] | None

    def read(self, *, device_used: bool) -> Reading:
        """Take a reading; asking for device used costs a call into the driver."""

    def reset_peaks(self) -> None:
        """Start new peaks from what is in use now."""

    def block_bytes(self, size: int) -> int:
        """Bytes that the allocator takes for a tensor of `size` bytes."""


def open_reader(spec: DeviceSpec) -> MemoryReader:
    """Open the device of a trial, enforce its limit, and return the reader of its memory."""
    if spec.kind is DeviceKind.CPU:
        return HostMemory()
    return CudaMemory(spec)


class CudaMemory:
    """A CUDA device, real or virtual, through PyTorch's caching allocator."""

    def __init__(self, spec: DeviceSpec) -> None:
        """Create the CUDA context and cap the allocator at the device's limit.

        A virtual card is made as large as the limit, so that its own driver refuses what does not
        fit. On a real one, what is in use before the first tensor lies outside the allocator and
        is taken off the limit.
        """
        import torch  # noqa: PLC0415

        self._nvml = Nvml()
        self.virtual = virtual = spec.kind is DeviceKind.VIRTUAL
        if virtual:
            from memfit.virtual import control  # noqa: PLC0415

            try:
                control.set_total_bytes(spec.limit_bytes)
            except ValueError as error:
                raise WorkloadError(
                    f"CUDA was in use before the trial began: {error}",
                    hint="do not use CUDA at the top of the module; make the model in model()",
                ) from None
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._cuda = torch.cuda
        self.uuid = str(torch.cuda.get_device_properties(self.device).uuid)
        before = 0 if virtual else self._nvml.used_bytes(self.uuid)
        torch.cuda.init()  # type: ignore[no-untyped-call]
        free, total = torch.cuda.mem_get_info(self.device)
        self.device_used_source = (
            "nvml" if self._nvml.used_bytes(self.uuid) is not None else "mem_get_info"
        )
        self.used_before_bytes = before
        if not virtual:
            allowed = max(spec.limit_bytes - (total - free), 0)
            torch.cuda.set_per_process_memory_fraction(min(allowed / total, 1.0), self.device)

    device: torch.device
    used_before_bytes: int | None
    device_used_source: Literal["nvml", "mem_get_info", "rss"] | None

    def read(self, *, device_used: bool) -> Reading:
        """Read the allocator's counters and, where asked, the driver's."""
        stats: Any = self._cuda.memory_stats_as_nested_dict(self.device)
        used = self._used() if device_used else None
        reserves = stats["reserved_bytes"]["all"]
        reserved = reserves["current"]
        outside = None
        if used is not None and self.used_before_bytes is not None:
            outside = max(used - self.used_before_bytes - reserved, 0)
        allocation = stats["allocation"]["all"]
        return Reading(
            peak_allocated_bytes=stats["allocated_bytes"]["all"]["peak"],
            peak_reserved_bytes=reserves["peak"],
            allocated_bytes=stats["allocated_bytes"]["all"]["current"],
            reserved_bytes=reserved,
            taken_bytes=reserves["allocated"],
            alloc_retries=stats["num_alloc_retries"],
            inactive_split_bytes=stats["inactive_split_bytes"]["all"]["current"],
            allocator_events=allocation["allocated"] + allocation["freed"],
            device_used_bytes=used,
            outside_allocator_bytes=outside,
        )

    def _used(self) -> int:
        used = self._nvml.used_bytes(self.uuid)
        if used is not None:
            return used
        free, total = self._cuda.mem_get_info(self.device)
        return int(total - free)

    def reset_peaks(self) -> None:
        """Start new peaks from what is in use now."""
        self._cuda.reset_peak_memory_stats(self.device)

    def block_bytes(self, size: int) -> int:
        """Round up to the allocator's block."""
        return -(-size // BLOCK_BYTES) * BLOCK_BYTES


class HostMemory:
    """The host memory of this process; its peak is the kernel's high-water mark."""

    device_used_source: Literal["nvml", "mem_get_info", "rss"] | None = "rss"
    used_before_bytes: int | None = None
    device: torch.device

    def __init__(self) -> None:
        """Start from what the process has in use."""
        import torch  # noqa: PLC0415

        self.device = torch.device("cpu")
        self.reset_peaks()

    def read(self, *, device_used: bool) -> Reading:
        """Read the peak resident memory since the last reset."""
        return Reading(
            peak_allocated_bytes=None,
            peak_reserved_bytes=None,
            allocated_bytes=None,
            reserved_bytes=None,
            taken_bytes=None,
            alloc_retries=None,
            inactive_split_bytes=None,
            allocator_events=0,
            device_used_bytes=peak_resident_bytes() if device_used else None,
            outside_allocator_bytes=None,
        )

    def reset_peaks(self) -> None:
        """Reset the kernel's high-water mark where it lets us; else peaks only rise."""
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            return

    def block_bytes(self, size: int) -> int:
        """Host tensors take what they are."""
        return size


def peak_resident_bytes() -> int:
    """Peak resident memory of this process since the last reset, in bytes."""
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    import resource  # noqa: PLC0415

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
