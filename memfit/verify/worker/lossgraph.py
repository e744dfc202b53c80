"""Reading a loss: from the root of its graph down to the mean or sum that it is.

On the way down, multiplications and divisions by constants are collected. What is known of the
graph's nodes is their public saved tensors; a compiled or custom node ends the reading.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any, Literal

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class LossReading:
    """What a loss is, as its graph says."""

    factor: float
    """Product of the constants above the reduction."""
    reduction: Literal["mean", "sum"]
    elements: int | None
    """Elements that the reduction is over, without those that are ignored; None if not known."""
    divisors: tuple[float, ...]
    """The constants that it was divided by directly above the reduction, the innermost last."""

    @property
    def element_weight(self) -> float | None:
        """What one element of the loss counts."""
        if self.reduction == "sum":
            return self.factor
        return None if not self.elements else self.factor / self.elements


_PASS_THROUGH = (
    "ToCopyBackward", "ViewBackward", "UnsafeViewBackward", "SqueezeBackward",
    "UnsqueezeBackward", "ReshapeAliasBackward", "CloneBackward", "ExpandBackward",
    "AliasBackward", "SelectBackward", "IndexBackward", "CopyBackwards", "CopySlices",
    "AsStridedBackward", "ToDtypeBackward",
)  # fmt: skip
_LOSSES = (
    "MseLossBackward", "L1LossBackward", "SmoothL1LossBackward", "HuberLossBackward",
    "BinaryCrossEntropyBackward", "BinaryCrossEntropyWithLogitsBackward", "SoftMarginLossBackward",
)  # fmt: skip
_MAX_DEPTH = 60
_SIGN_BIT = 2**63


def read_loss(loss: torch.Tensor) -> LossReading | None:
    """Read a scalar loss; None where its graph cannot be followed."""
    node = loss.grad_fn
    if node is None:
        return None
    with contextlib.suppress(RuntimeError, AttributeError, IndexError):
        return _read(node, 1.0, (), 0)
    return None


def _read(  # noqa: C901, PLR0911 - one branch a kind of node
    node: Any, factor: float, divisors: tuple[float, ...], depth: int
) -> LossReading | None:
    if node is None or depth > _MAX_DEPTH:
        return None
    name = type(node).__name__.rstrip("0123456789")
    following = [n for n, _ in node.next_functions]
    if name == "DivBackward":
        if len(following) > 1 and following[1] is not None:
            return None
        by = _scalar(node, "other")
        return None if not by else _read(following[0], factor / by, (*divisors, by), depth + 1)
    if name == "MulBackward":
        live = 0 if following[0] is not None else 1
        if following[1 - live] is not None:
            return None
        by = _scalar(node, "other" if live == 0 else "self")
        return None if by is None else _read(following[live], factor * by, (), depth + 1)
    if name in ("AddBackward", "SubBackward"):
        return _read_added(node, following, factor, divisors, depth)
    if name == "NegBackward":
        return _read(following[0], -factor, divisors, depth + 1)
    if name in _PASS_THROUGH:
        return _read(following[0], factor, divisors, depth + 1)
    if name == "MeanBackward":
        return _reading(factor, divisors, "mean", _numel(node))
    if name == "SumBackward":
        below = _below_sum(following[0])
        return _reading(factor, divisors, "sum", below)
    if name in ("NllLossBackward", "NllLoss2DBackward"):
        return _read_reduced(node, factor, divisors, _targets(node))
    if name in _LOSSES:
        return _read_reduced(node, factor, divisors, _saved(node, "self").numel())
    return None


def _read_added(
    node: Any, following: list[Any], factor: float, divisors: tuple[float, ...], depth: int
) -> LossReading | None:
    """Read a sum of losses: that of the one with a graph, or of all when they agree."""
    signs = [1.0, -1.0 if type(node).__name__.startswith("Sub") else 1.0]
    live = [(n, s) for n, s in zip(following, signs, strict=False) if n is not None]
    if len(live) == 1:
        return _read(live[0][0], factor * live[0][1], divisors, depth + 1)
    readings = [_read(n, factor * s, (), depth + 1) for n, s in live]
    first = readings[0] if readings else None
    if first is None or any(r is None for r in readings):
        return None
    same = {(abs(r.factor), r.reduction, r.elements) for r in readings if r is not None}
    return first if len(same) == 1 else None


def _reading(
    factor: float,
    divisors: tuple[float, ...],
    reduction: Literal["mean", "sum"],
    elements: int | None,
) -> LossReading:
    return LossReading(
        factor=abs(factor), reduction=reduction, elements=elements, divisors=divisors
    )


def _read_reduced(
    node: Any, factor: float, divisors: tuple[float, ...], elements: int
) -> LossReading | None:
    kinds: dict[int, Literal["mean", "sum"]] = {1: "mean", 2: "sum"}
    kind = kinds.get(_saved(node, "reduction"))
    return None if kind is None else _reading(factor, divisors, kind, elements)


def _targets(node: Any) -> int:
    ignore = _saved(node, "ignore_index")
    ignore = ignore - 2 * _SIGN_BIT if ignore >= _SIGN_BIT else ignore
    return int((_saved(node, "target") != ignore).sum())


def _below_sum(node: Any) -> int | None:
    """Elements of an unreduced loss under a sum, where it is one that ignores some."""
    for _ in range(4):
        if node is None:
            return None
        name = type(node).__name__.rstrip("0123456789")
        if name in ("NllLossBackward", "NllLoss2DBackward"):
            return _targets(node)
        if name not in _PASS_THROUGH:
            return None
        node = node.next_functions[0][0]
    return None


def _numel(node: Any) -> int | None:
    value = _saved(node, "self_sym_numel")
    return None if value is None else int(value)


def _scalar(node: Any, name: str) -> float | None:
    value = _saved(node, name)
    if isinstance(value, torch.Tensor):
        return float(value) if value.numel() == 1 else None
    return float(value) if isinstance(value, int | float) else None


def _saved(node: Any, name: str) -> Any:
    """Return what a node of the graph keeps for its backward, or None."""
    return getattr(node, f"_saved_{name}", None)
