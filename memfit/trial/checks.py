"""What a workload must return, and signs that it does not train."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from memfit.errors import WorkloadError
from memfit.group import as_number, check_loss
from memfit.records import DeviceKind, Precision, TrialSpec
from memfit.workload import Workload

if TYPE_CHECKING:
    import torch


class CheckFailed(WorkloadError):
    """The workload ran but did not train."""

    def __init__(self, rule: str, message: str, *, hint: str) -> None:
        """Name the rule that was broken."""
        super().__init__(message, hint=hint)
        self.rule = rule


def check_model(model: Any, *, made_by: str = "model()") -> torch.nn.Module:
    """Return what `model()` or `parallelize()` returned when it is a module that can be trained."""
    import torch  # noqa: PLC0415

    if not isinstance(model, torch.nn.Module):
        raise WorkloadError(
            f"{made_by} returned {_kind(model)}, not a torch.nn.Module",
            hint="return the module that is trained",
        )
    if not any(p.requires_grad for p in model.parameters()):
        raise WorkloadError(
            "the model has no parameter that needs a gradient", hint="unfreeze what is trained"
        )
    return model


def _kind(value: Any) -> str:
    if value is None:
        return "None"
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__


def check_optimizer(optimizer: Any) -> Any:
    """Return what `optimizer()` returned when it can step, on its own, and clear gradients."""
    lacks = not hasattr(optimizer, "step") or not hasattr(optimizer, "zero_grad")
    if lacks or isinstance(optimizer, type):
        raise WorkloadError(
            f"optimizer() returned {_kind(optimizer)}, not an optimizer",
            hint="return a torch.optim.Optimizer",
        )
    needed = [p for p in inspect.signature(optimizer.step).parameters.values() if _is_needed(p)]
    if needed:
        raise WorkloadError(
            f"{type(optimizer).__name__}.step() needs {needed[0].name!r}, and a group of "
            "accumulated microbatches ends with one step that takes nothing",
            hint="`memfit run --device CARD -- python train.py` measures a program with a loop of "
            "its own",
        )
    return optimizer


def _is_needed(parameter: inspect.Parameter) -> bool:
    given = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    return parameter.default is parameter.empty and not given


def check_given(batch: Any, size: int) -> None:
    """Refuse a batch that is not there."""
    if batch is None:
        raise WorkloadError(
            f"batch({size}) returned None, not a microbatch",
            hint="batch(m) returns a microbatch of m examples; is a return missing?",
        )


def check_batch(batch: Any, size: int) -> None:
    """Refuse a batch in which nothing has `size` examples.

    They are the first dimension of a tensor, or the items of a list or tuple: detection models
    take a list of images and a list of targets.
    """
    check_given(batch, size)
    import torch  # noqa: PLC0415
    from torch.utils._pytree import tree_leaves  # noqa: PLC0415

    def is_items(value: Any) -> bool:
        listed = isinstance(value, list) or (isinstance(value, tuple) and value is not batch)
        return listed and len(value) == size

    leaves = tree_leaves(batch, is_leaf=is_items)
    shapes = [tuple(t.shape) for t in leaves if isinstance(t, torch.Tensor)]
    if any(map(is_items, leaves)) or any(shape[:1] == (size,) for shape in shapes):
        return
    if shapes:
        raise WorkloadError(
            f"batch({size}) returned tensors of shape {', '.join(map(str, shapes[:3]))}: "
            f"none has {size} as its first dimension",
            hint="batch(m) makes a microbatch of m examples",
        )


def check_count(count: Any, size: int) -> int:
    """Return the elements of a microbatch of `size` examples when they are a number of them."""
    number = as_number(count)
    if not isinstance(number, int) or number < 1:
        raise WorkloadError(
            f"count() returned {count!r} for a microbatch of {size}",
            hint="return the number of elements that the loss is a mean over, as an int",
        )
    return number


def first_loss(workload: Workload, spec: TrialSpec) -> Callable[[Any, Any], Any]:
    """Return the workload's loss; where kernels really run, one that looks at its value."""
    if spec.device.kind is DeviceKind.VIRTUAL:
        return workload.loss

    def loss(model: Any, batch: Any) -> Any:
        value = check_loss(workload.loss(model, batch))
        import torch  # noqa: PLC0415

        if not torch.isfinite(value.detach()).item():
            raise CheckFailed(
                "loss not finite",
                f"the loss of the first group is {value.item()}",
                hint="check the inputs that batch() makes and the precision",
            )
        return value

    return loss


def check_gradients(model: torch.nn.Module, spec: TrialSpec) -> None:
    """Refuse a group that left parameters without a gradient, or gradients that are not finite."""
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    missing = [name for name, p in trained if p.grad is None]
    if missing:
        shown = ", ".join(missing[:5]) + (" …" if len(missing) > 5 else "")  # noqa: PLR2004
        raise CheckFailed(
            "gradient missing",
            f"{len(missing)} of {len(trained)} parameters got no gradient "
            f"from a whole group: {shown}",
            hint="use them in the loss, or freeze them with requires_grad_(False)",
        )
    if spec.device.kind is DeviceKind.VIRTUAL or spec.precision is Precision.FP16:
        return  # no values there; and a scaler skips what is not finite, which is counted
    import torch  # noqa: PLC0415

    for name, parameter in trained:
        if parameter.grad is not None and not torch.isfinite(
            torch.linalg.vector_norm(parameter.grad)
        ):
            raise CheckFailed(
                "gradient not finite",
                f"the gradient of {name} is not finite in the first group",
                hint="check the inputs that batch() makes, the loss and the precision",
            )
