"""One accumulation group: the only training loop in the project.

A group is `A` microbatches, then unscale, clip, optimizer step and zero_grad, once each. With
microbatches `i` of `n_i` elements and mean losses `l_i`, its loss is `sum(n_i / N * l_i)`, where
`N` counts the elements of the group over all replicas. DistributedDataParallel averages gradients
over `D` replicas, so every contribution carries a factor `D`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any, Protocol

from memfit.batch import weights
from memfit.errors import UsageError, WorkloadError
from memfit.records import Precision

if TYPE_CHECKING:
    import torch


class PhaseListener(Protocol):
    """Told when a phase begins, before any of its work."""

    def __call__(self, phase: str, microbatch: int | None) -> None:
        """Hear of forward, backward, optimizer_step or group_done; microbatches count from 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOutcome:
    """What one group did."""

    loss: torch.Tensor
    """The group's loss on this replica: `sum(n_i / N * l_i)` times `D`, detached, a scalar."""
    gradient_norm: torch.Tensor | None
    """Norm of the whole gradient before clipping; None where nothing was clipped."""
    step_applied: bool
    """Whether the optimizer step was applied; a scaler skips it when a gradient is not finite."""


def run_group(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    microbatches: Iterable[Any],
    *,
    loss: Callable[[Any, Any], torch.Tensor],
    counts: Sequence[int],
    total_count: int | None = None,
    replicas: int = 1,
    device: torch.device | str | None = None,
    precision: Precision | str = Precision.FP32,
    scaler: torch.amp.GradScaler | None = None,
    clip_norm: float | None = None,
    on_phase: PhaseListener | None = None,
) -> GroupOutcome:
    """Run one accumulation group, its optimizer step included.

    Args:
        model: The model, wrapped for data parallelism where there are replicas.
        optimizer: Its optimizer; gradients are expected to be None or zero.
        microbatches: The microbatches, consumed one at a time; anything that `loss` understands.
        loss: Called as `loss(model, microbatch)`; returns the mean over the microbatch's elements.
        counts: Elements that each microbatch's mean is over: examples, or tokens.
        total_count: Elements of the group over all replicas. The default, `replicas` times the sum
            of `counts`, is right when every replica has as many elements as this one.
        replicas: Data-parallel replicas over which the model's wrapper averages gradients.
        device: Where microbatches are moved before forward; None leaves them where they are.
        precision: `fp32`, or autocast to `bf16` or `fp16` in forward.
        scaler: The gradient scaler that goes with `fp16`; it updates once, after the step.
        clip_norm: Norm to which the whole gradient is clipped, once; None for no clipping.
        on_phase: Told when each phase begins.

    Raises:
        WorkloadError: When a loss is no scalar tensor or has no graph, or the number of
            microbatches is not that of `counts`.
        UsageError: When the precision is none, or `fp16` comes without its scaler.
    """
    import torch  # noqa: PLC0415

    if precision not in list(Precision):
        raise UsageError(f"{precision!r} is no precision", hint=f"use {', '.join(Precision)}")
    if precision == Precision.FP16 and scaler is None:
        raise UsageError(
            "fp16 without a scaler loses small gradients",
            hint='pass scaler=torch.amp.GradScaler("cuda"), one for the whole training',
        )
    notify = on_phase or _ignore
    numbers = [as_number(count) for count in counts]
    total = replicas * sum(numbers) if total_count is None else as_number(total_count)
    factors = weights(numbers, total=total, replicas=replicas)
    target = torch.device(device) if device is not None else None
    cast = _autocast(Precision(precision), target or _device_of(model))
    group_loss: torch.Tensor | None = None
    last = len(factors) - 1
    index = -1
    for index, microbatch in enumerate(microbatches):
        if index > last:
            break
        with _gradient_sync(model, enabled=index == last):
            notify("forward", index)
            moved = microbatch if target is None else to_device(microbatch, target)
            del microbatch
            with cast():
                value = check_loss(loss(model, moved))
            contribution = value * factors[index]
            seen = contribution.detach()
            group_loss = seen if group_loss is None else group_loss + seen
            scaled = contribution if scaler is None else scaler.scale(contribution)
            notify("backward", index)
            scaled.backward()  # type: ignore[no-untyped-call]
            del moved, value, contribution, scaled, seen
    if index != last or group_loss is None:
        raise WorkloadError(f"{len(factors)} counts were given for {index + 1} microbatches")

    notify("optimizer_step", None)
    outcome = _finish(model, optimizer, group_loss, scaler=scaler, clip_norm=clip_norm)
    notify("group_done", None)
    return outcome


def _finish(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    group_loss: torch.Tensor,
    *,
    scaler: torch.amp.GradScaler | None,
    clip_norm: float | None,
) -> GroupOutcome:
    """Unscale, clip, step, update the scaler and clear the gradients, once each, in this order."""
    import torch  # noqa: PLC0415

    norm: torch.Tensor | None = None
    if scaler is not None and clip_norm is not None:
        scaler.unscale_(optimizer)
    if clip_norm is not None:
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
    applied = True
    if scaler is None:
        optimizer.step()
    else:
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        applied = scaler.get_scale() >= before  # the scale falls exactly when a step was skipped
    optimizer.zero_grad(set_to_none=True)
    return GroupOutcome(loss=group_loss, gradient_norm=norm, step_applied=applied)


def as_number(count: Any) -> Any:
    """Return a count as a number of Python's; what is none is returned as it is.

    A tensor of one integer is one: `(labels != -100).sum()`.
    """
    if isinstance(count, int | float):
        return count
    try:
        return operator.index(count)
    except TypeError:
        return count


def check_loss(value: Any) -> torch.Tensor:
    """Return the loss when it is a scalar tensor with a graph.

    Raises:
        WorkloadError: When it is not, naming what it is instead.
    """
    import torch  # noqa: PLC0415

    if not isinstance(value, torch.Tensor):
        raise WorkloadError(
            f"loss() returned {type(value).__name__}, not a tensor",
            hint="return the mean loss of the microbatch as a scalar tensor",
        )
    if value.numel() != 1:
        raise WorkloadError(
            f"loss() returned a tensor of shape {tuple(value.shape)}, not a scalar",
            hint="return its mean over the microbatch's elements",
        )
    if not value.requires_grad:
        raise WorkloadError(
            "loss() returned a tensor without a graph, so backward cannot reach the parameters",
            hint="do not detach the loss or compute it under torch.no_grad()",
        )
    return value


def to_device(value: Any, device: torch.device) -> Any:  # noqa: PLR0911 - one return a kind
    """Move every tensor in a nest of dicts, sequences, dataclasses and objects with `.to`."""
    import torch  # noqa: PLC0415

    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if hasattr(value, "to"):  # a transformers BatchEncoding is a mapping that moves itself
        return value.to(device)
    if isinstance(value, Mapping):
        return {key: to_device(item, device) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(to_device(item, device) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(to_device(item, device) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        changed = {f.name: to_device(getattr(value, f.name), device) for f in fields(value)}
        return type(value)(**changed)
    return value


def _ignore(phase: str, microbatch: int | None) -> None:
    """Listen to nothing."""


def _device_of(model: torch.nn.Module) -> torch.device:
    import torch  # noqa: PLC0415

    first = next(model.parameters(), None)
    return torch.device("cpu") if first is None else first.device


def _autocast(
    precision: Precision, device: torch.device
) -> Callable[[], AbstractContextManager[Any]]:
    """Return what makes the context of one forward pass."""
    import torch  # noqa: PLC0415

    if precision is Precision.FP32:
        return nullcontext
    dtype = torch.bfloat16 if precision is Precision.BF16 else torch.float16
    return lambda: torch.autocast(device.type, dtype=dtype)


def _gradient_sync(model: Any, *, enabled: bool) -> AbstractContextManager[Any]:
    """Let replicas reduce gradients in the group's last microbatch only."""
    if hasattr(model, "set_requires_gradient_sync"):  # FSDP2
        model.set_requires_gradient_sync(enabled)
        return nullcontext()
    if not enabled and hasattr(model, "no_sync"):  # DistributedDataParallel, FSDP1
        context: AbstractContextManager[Any] = model.no_sync()
        return context
    return nullcontext()
