"""Cutting one batch into microbatches of the same examples.

The dimension that holds the examples is found by behaviour: it is the one that grows with `m` in
`batch(m)`. What does not grow goes to every microbatch as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch


class CannotSplit(Exception):
    """A batch that no rule can cut; the message says why."""


@dataclass(frozen=True, slots=True)
class _Leaf:
    """How one part of a batch is cut: `unit` entries of dimension `dim` belong to an example."""

    dim: int
    unit: int


Parts = list[_Leaf | None]


class Splitter:
    """Cuts batches that have the form of two samples."""

    def __init__(self, batch: Any, size: int, other: Any, other_size: int) -> None:
        """Learn the form.

        Args:
            batch: A batch of `size` examples.
            size: Its number of examples.
            other: A batch of another number of examples.
            other_size: That number.

        Raises:
            CannotSplit: When a part has no dimension of examples, or nothing has one.
        """
        self._size = size
        leaves, others = list(_leaves(batch)), list(_leaves(other))
        if len(leaves) != len(others):
            raise CannotSplit(
                f"a batch of {size} has {len(leaves)} parts and one of {other_size} has "
                f"{len(others)}"
            )
        self._rules = [_rule(a, b, size, other_size) for a, b in zip(leaves, others, strict=True)]
        if not any(self._rules):
            raise CannotSplit(f"no part of a batch of {size} has {size} examples")

    def cut(self, batch: Any, sizes: Sequence[int]) -> list[Any]:
        """Cut a batch into microbatches of these sizes, in order."""
        made, start = [], 0
        for size in sizes:
            made.append(self.take(batch, start, start + size))
            start += size
        return made

    def turned(self, batch: Any) -> Any:
        """Return the same batch with its second half of examples first."""
        rules = iter(self._rules)
        half = self._size // 2

        def part(leaf: Any) -> Any:
            rule = next(rules)
            if rule is None:
                return leaf
            if isinstance(leaf, torch.Tensor):
                return leaf.roll(-half * rule.unit, rule.dim)
            return [*leaf[half:], *leaf[:half]]

        return _map(batch, part)

    def take(self, batch: Any, start: int, stop: int) -> Any:
        """Return the examples from `start` to `stop`."""
        rules = iter(self._rules)

        def part(leaf: Any) -> Any:
            rule = next(rules)
            if rule is None:
                return leaf
            low, high = start * rule.unit, stop * rule.unit
            if isinstance(leaf, torch.Tensor):
                return leaf.narrow(rule.dim, low, high - low)
            return leaf[low:high]

        return _map(batch, part)


def _rule(a: Any, b: Any, size: int, other: int) -> _Leaf | None:
    if type(a) is not type(b):
        raise CannotSplit(f"a part is {type(a).__name__} once and {type(b).__name__} once")
    if isinstance(a, torch.Tensor):
        return _tensor_rule(a, b, size, other)
    if _is_items(a):
        if len(a) == len(b):
            return None
        if len(a) == size and len(b) == other:
            return _Leaf(0, 1)
        raise CannotSplit(f"a list of {len(a)} items for {size} examples has {len(b)} for {other}")
    if isinstance(a, bool | int | float | complex | str | bytes | None):
        return None
    raise CannotSplit(f"a {type(a).__name__} cannot be cut")


def _tensor_rule(a: torch.Tensor, b: torch.Tensor, size: int, other: int) -> _Leaf | None:
    if a.is_nested or a.is_sparse:
        raise CannotSplit("a nested or sparse tensor has no dimension of examples")
    if a.ndim != b.ndim:
        raise CannotSplit(f"a tensor has {a.ndim} dimensions once and {b.ndim} once")
    for dim, (x, y) in enumerate(zip(a.shape, b.shape, strict=True)):
        if (x, y) == (size, other):
            return _Leaf(dim, 1)
    differing = [dim for dim in range(a.ndim) if a.shape[dim] != b.shape[dim]]
    if not differing:
        return None
    for dim in differing:
        x, y = a.shape[dim], b.shape[dim]
        if x % size == 0 and y % other == 0 and x // size == y // other:
            return _Leaf(dim, x // size)
    raise CannotSplit(
        f"a tensor of shape {tuple(a.shape)} for {size} examples has {tuple(b.shape)} for {other}"
    )


# -- walking through a batch -----------------------------------------------------------------


def _is_items(value: Any) -> bool:
    """Whether it is a list of one item an example, rather than a structure of tensors."""
    return isinstance(value, list) and not any(isinstance(item, torch.Tensor) for item in value)


def _leaves(value: Any) -> list[Any]:
    found: list[Any] = []

    def note(leaf: Any) -> Any:
        found.append(leaf)
        return leaf

    _map(value, note)
    return found


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a batch with its tensors changed, those in lists of items included."""

    def part(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return change(leaf)
        return [_map(item, part) for item in leaf] if _is_items(leaf) else leaf

    return _map(value, part)


def _map(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, torch.nn.utils.rnn.PackedSequence):
        raise CannotSplit("a packed sequence interleaves its examples")
    if isinstance(value, torch.Tensor) or _is_items(value):
        return change(value)
    if isinstance(value, Mapping):
        return _like(value, {key: _map(item, change) for key, item in value.items()})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_map(item, change) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(_map(item, change) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        made = {f.name: _map(getattr(value, f.name), change) for f in fields(value)}
        return type(value)(**made)
    return change(value)


def _like(original: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    kind: Any = type(original)
    try:
        return kind(items)
    except TypeError:
        return items
