"""What `memfit doctor` and `memfit gpus` run in a process of their own on a device.

For `doctor` it is a training step whose peak can be worked out on paper. It is made so that the
peak does not depend on the version of torch: layers without a bias call cuBLAS and never cuBLASLt,
whose workspaces changed from release to release, and the parameters outweigh the activations, so
that the peak falls into the optimizer step. It holds for cards before Hopper, where PyTorch's
cuBLAS workspaces have had one size since 2.0.

For `gpus` it is a look at the card of this machine: `python -m memfit.selftest` prints what CUDA
and NVML say of it, as JSON.
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from memfit.devices.nvml import Nvml
from memfit.units import KIB
from memfit.virtual import control
from memfit.virtual.card_file import CardReading
from memfit.workload import Workload

if TYPE_CHECKING:
    import torch

MICROBATCH = 8
_WIDTH = 512
_LAYERS = 2
_FLOAT_BYTES = 4
_BLOCK_BYTES = 512
"""The caching allocator rounds every request up to this (kMinBlockSize, CUDACachingAllocator)."""
_HANDLES = 2
"""cuBLAS handles are thread-local: one of the main thread, and one of autograd's device thread."""
_WORKSPACE_CONFIG = ":4096:2:16:8"
"""PyTorch's default CUBLAS_WORKSPACE_CONFIG before Hopper: two buffers of 4096 KiB and eight of 16
KiB (notes on CUDA semantics, "cuBLAS workspaces")."""


class SelfTest(Workload):
    """Two layers and AdamW."""

    def model(self) -> torch.nn.Module:
        """Build two layers."""
        from torch import nn  # noqa: PLC0415

        return nn.Sequential(
            nn.Linear(_WIDTH, _WIDTH, bias=False),
            nn.ReLU(),
            nn.Linear(_WIDTH, _WIDTH, bias=False),
        )

    def batch(self, m: int) -> torch.Tensor:
        """Make random vectors."""
        import torch  # noqa: PLC0415

        return torch.randn(m, _WIDTH, device=self.device)

    def loss(self, model: Any, batch: torch.Tensor) -> torch.Tensor:
        """Return the mean square of the output."""
        loss: torch.Tensor = model(batch).square().mean()
        return loss


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part of an expected peak."""

    name: str
    size_bytes: int


def expected_forward() -> tuple[Part, ...]:
    """Return what is allocated at the peak of a forward pass in the first group, but not its first.

    The gradients are there already, both cuBLAS handles have their workspaces, and there is no
    optimizer state yet.
    """
    return (
        *_standing(),
        # The input and the output of the activation, which their layers' backward needs; the
        # output, which the square's backward needs; and the square, which the mean reads.
        Part(name="activations", size_bytes=4 * _blocks(MICROBATCH * _WIDTH * _FLOAT_BYTES)),
        Part(name="loss and the group's loss so far", size_bytes=2 * _BLOCK_BYTES),
    )


def expected_peak() -> tuple[Part, ...]:
    """Return what is allocated at the peak, which is in the optimizer step."""
    parameters = _parameter_bytes()
    return (
        *_standing(),
        # exp_avg and exp_avg_sq; the step counters of AdamW are on the CPU unless it is capturable.
        Part(name="optimizer state", size_bytes=2 * parameters),
        # torch.optim.AdamW, note on foreach: "uses ~ sizeof(params) more peak memory".
        Part(name="the foreach step's intermediates", size_bytes=parameters),
        Part(name="the group's loss so far", size_bytes=_BLOCK_BYTES),
    )


def _standing() -> tuple[Part, ...]:
    workspace = _workspace_bytes()
    return (
        Part(name="parameters", size_bytes=_parameter_bytes()),
        Part(name="gradients", size_bytes=_parameter_bytes()),
        Part(name="cuBLAS workspaces", size_bytes=_HANDLES * _blocks(workspace)),
    )


def _parameter_bytes() -> int:
    return _LAYERS * _blocks(_WIDTH * _WIDTH * _FLOAT_BYTES)


def _blocks(size: int) -> int:
    return -(-size // _BLOCK_BYTES) * _BLOCK_BYTES


def _workspace_bytes() -> int:
    """Return the size of one cuBLAS workspace, as PyTorch's notes on CUDA semantics give it."""
    own = re.findall(r":(\d+):(\d+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    buffers = own or re.findall(r":(\d+):(\d+)", _WORKSPACE_CONFIG)
    return sum(int(size) * int(count) * KIB for size, count in buffers)


class Failure(msgspec.Struct, kw_only=True):
    """Why the card of this machine cannot be read."""

    failure: str


def read_card() -> CardReading:
    """Read the current CUDA device of this process, and create its context to see what that takes.

    Raises:
        RuntimeError: When CUDA has no device here.
    """
    import torch  # noqa: PLC0415

    nvml = Nvml()
    virtual = control.active()
    properties: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
    uuid = str(properties.uuid)
    # The stand-in driver charges the context from the start.
    before = 0 if virtual else nvml.used_bytes(uuid)
    _, total = torch.cuda.mem_get_info()  # creates the context
    after = nvml.used_bytes(uuid)
    context = None if before is None or after is None or after <= before else after - before
    where = f"torch {torch.__version__} with driver {nvml.driver_version() or 'not known'}"
    how = "context: not read"
    if context is not None:
        less = "" if virtual else " less what was in use before"
        how = f"context: what NVML showed in use once it was there{less}, with few kernels loaded"
    return CardReading(
        name=properties.name,
        read_from="virtual" if virtual else "card",
        total_bytes=total,
        compute_capability=f"{properties.major}.{properties.minor}",
        sms=properties.multi_processor_count,
        smem_per_sm_bytes=properties.shared_memory_per_multiprocessor,
        smem_optin_bytes=properties.shared_memory_per_block_optin,
        l2_bytes=properties.L2_cache_size,
        context_bytes=context,
        source=f"{where}; {how}",
    )


def main() -> None:
    """Print the card of this machine, or why there is none."""
    try:
        answer: CardReading | Failure = read_card()
    except Exception as error:  # noqa: BLE001 - whatever stands in the way is the answer
        answer = Failure(failure=str(error).partition("\n")[0] or type(error).__name__)
    sys.stdout.write(msgspec.json.encode(answer).decode() + "\n")


if __name__ == "__main__":
    main()
