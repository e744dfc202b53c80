"""What a trial can run beside its groups: the state of a resumed start, and an evaluation pass."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from memfit.group import to_device
from memfit.records import EvaluationPeak, Precision, TrialSpec

if TYPE_CHECKING:
    from memfit.devices.memory import MemoryReader
    from memfit.workload import Workload


def make_optimizer_state(model: Any, optimizer: Any) -> None:
    """Make the optimizer's state, as it is after a checkpoint was loaded.

    An optimizer makes its state in its first step, so it takes one with gradients of zero. They
    are freed and their memory given back, for no gradient is there when training goes on.
    """
    import torch  # noqa: PLC0415

    parameters = [p for p in model.parameters() if p.requires_grad]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for parameter in parameters:
        parameter.grad = None
    if parameters and parameters[0].device.type == "cuda":
        torch.cuda.empty_cache()


def evaluate(
    workload: Workload, model: Any, spec: TrialSpec, reader: MemoryReader
) -> EvaluationPeak:
    """Run an evaluation pass over two microbatches of the training size, and read its peak."""
    import torch  # noqa: PLC0415

    device = reader.device
    dtype = torch.bfloat16 if spec.precision is Precision.BF16 else torch.float16
    cast: Any = nullcontext()
    if spec.precision is not Precision.FP32:
        cast = torch.autocast(device.type, dtype=dtype)
    reader.reset_peaks()
    model.eval()
    try:
        for _ in range(2):  # the first result may still be there when the second pass begins
            batch = to_device(workload.batch(spec.sizes[0]), device)
            with cast:
                result = workload.evaluate(model, batch)
            del batch, result
    finally:
        model.train()
    reading = reader.read(device_used=True)
    reserved = reading.peak_reserved_bytes
    return EvaluationPeak(
        microbatch=spec.sizes[0],
        peak_allocated_bytes=reading.peak_allocated_bytes,
        peak_bytes=reading.device_used_bytes
        if reserved is None
        else reserved + (reading.outside_allocator_bytes or 0),
    )
