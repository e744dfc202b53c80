"""The cause of a difference that no layer explains, by what the loss is."""

from __future__ import annotations

from memfit.verification import Comparison, LossNature

_SHOWN = 8


def explain(
    unequal: Comparison,
    nature: LossNature,
    *,
    size: int,
    counted: bool,
    loss: float,
    loss_of_group: float,
) -> tuple[str, str, str]:
    """Return code and evidence of the cause, and the method of the workload where it lies.

    Args:
        unequal: A comparison that is not equal.
        nature: What the loss is, as the gradients of single examples show it.
        size: Examples of the physical batch.
        counted: Whether the workload says by `count` what its loss is a mean over.
        loss: Loss of the physical batch.
        loss_of_group: Loss of an accumulated group.
    """
    apart = (
        f"split as {'+'.join(map(str, unequal.sizes))}, the accumulated gradient is off by "
        f"{unequal.error:.2g} of the batch's (tolerance {unequal.tolerance:.1g}), most in "
        f"{unequal.worst_parameter}"
    )
    if unequal.worst_error <= unequal.tolerance:
        return (
            "MF102",
            f"The gradients agree to {unequal.error:.2g}, the parameters after one step only to "
            f"{unequal.step_error:.2g} of the step (tolerance {unequal.step_tolerance:.1g}).",
            "optimizer",
        )
    if nature.kind == "sum":
        return "MF202", f"The gradient of {size} examples is the sum of theirs; {apart}.", "loss"
    if nature.kind == "coupled":
        told = f"The gradient of {size} examples is no weighted sum of theirs; {apart}."
        return "MF303", told, "loss"
    if nature.kind == "mean":
        return _mean(nature, apart, size, counted=counted, loss=loss, loss_of_group=loss_of_group)
    if nature.kind == "scaled" and nature.factor is not None:
        told = (
            f"The gradients of {size} single examples enter the batch's with weights that add up "
            f"to {nature.factor:.4g}, where those of a mean add up to 1 and of a sum to {size}; "
        )
        return "MF101", f"{told}{apart}.", "loss"
    return "MF101", f"{apart[:1].upper()}{apart[1:]}.", "loss"


def _mean(
    nature: LossNature,
    apart: str,
    size: int,
    *,
    counted: bool,
    loss: float,
    loss_of_group: float,
) -> tuple[str, str, str]:
    """Say how the weights of a mean differ from what the group counts."""
    shares = ", ".join(f"{weight:.4g}" for weight in nature.weights[:_SHOWN])
    told = f"The examples' shares in the loss are {shares}, and "
    losses = f"the loss of the batch is {loss:.6g}"
    if counted:
        counts = ", ".join(map(str, nature.counts[:_SHOWN]))
        told += f"count() says {counts}; {losses}, the group's {loss_of_group:.6g}; {apart}."
        return "MF205", told, "count"
    told += (
        f"there is no count(), so each counts 1/{size}: {losses}, the mean of the microbatches' "
        f"means {loss_of_group:.6g}; {apart}."
    )
    return "MF201", told, "loss"
