"""What a watched loop did, event by event, and the groups that its events make.

The watcher notes events; `judge` and its neighbours read them. None of them knows torch, so that
every rule can be tested by a table of events.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from memfit.verification import Place

Kind = Literal[
    "backward",
    "step",
    "clip",
    "unscale",
    "update",
    "schedule",
    "zero",
]

CLOSE = 1e-3
"""Relative difference of shares that are taken to be the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One thing that the loop did."""

    kind: Kind
    place: Place | None = None
    factor: float | None = None
    """Of a backward pass: what the mean (or sum) of the loss was multiplied by, without the
    scaler's scale; None where the loss could not be read."""
    reduction: Literal["mean", "sum"] | None = None
    elements: int | None = None
    """Elements that the loss is over."""
    examples: int | None = None
    """Examples of the microbatch: the first dimension of what the model was given."""
    shape: tuple[int, ...] = ()
    """Shape of what the model was given."""
    digest: int | None = None
    """Checksum of what the model was given."""
    scale: float | None = None
    """Of a backward pass: the scaler's scale; None without a scaler."""
    cleared: bool | None = None
    """Of a backward pass: whether every gradient was None or zero when it began."""
    graphs: int = 0
    """Of a backward pass: graphs of earlier microbatches that were still alive."""
    retained: bool = False
    synced: Literal["both", "none", "forward", "backward"] | None = None
    """Of a backward pass of a data-parallel model: where gradients were to be reduced."""
    applied: bool = True
    """Of a step: whether the scaler let it happen."""
    scaled: bool = False
    """Of a clip: whether the gradients carried the scaler's scale."""
    fresh: bool = True
    """Of a schedule's step: whether an optimizer step came before it."""
    error: float | None = None
    """Of a step: relative error of its gradient against the mean over the group's elements."""

    @property
    def counted(self) -> int | None:
        """Elements of the microbatch, or its examples where the loss says nothing of elements."""
        return self.elements if self.elements is not None else self.examples

    @property
    def share(self) -> float | None:
        """What the microbatch's mean loss counts in the group's loss."""
        if self.factor is None:
            return None
        if self.reduction == "mean":
            return self.factor
        return None if self.elements is None else self.factor * self.elements


@dataclass(slots=True)
class Group:
    """The microbatches of one optimizer step, and what happened among them."""

    backward: list[Event] = field(default_factory=list)
    between: list[Event] = field(default_factory=list)
    """Everything else, before the last backward."""
    after: list[Event] = field(default_factory=list)
    """Everything else, after the last backward and before the step."""
    step: Event | None = None

    @property
    def size(self) -> int:
        """Microbatches."""
        return len(self.backward)

    @property
    def share(self) -> float:
        """What the mean losses of its microbatches count together; 1 in a right group."""
        return sum(e.share or 0.0 for e in self.backward)


def group_events(events: Sequence[Event]) -> list[Group]:
    """Gather events into groups: backward passes up to the optimizer step that follows them."""
    groups: list[Group] = []
    current = Group()
    for event in events:
        if event.kind == "backward":
            if current.step is not None:
                groups.append(current)
                current = Group()
            current.between += current.after
            current.after = []
            current.backward.append(event)
        elif event.kind == "step":
            if current.step is None:
                current.step = event
        else:
            current.after.append(event)
    if current.backward:
        groups.append(current)
    return groups


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What the user said of the loop."""

    microbatches: int | None = None
    """Accumulation steps, where they were named."""
    logical_batch: int | None = None
    """Examples of one optimizer step of this process, where they were named."""


def usual_size(groups: Sequence[Group]) -> int:
    """Return the number of microbatches that most groups have."""
    sizes = Counter(g.size for g in groups)
    return max(sizes, key=lambda size: (sizes[size], size)) if sizes else 1


def near(value: float, target: float) -> bool:
    """Whether a share is what it should be, but for rounding."""
    return abs(value - target) <= CLOSE * target


_FEW = 8


def listed(values: Sequence[float]) -> str:
    """Write the first few numbers."""
    return ", ".join(f"{v:,}" for v in values[:_FEW]) + (", …" if len(values) > _FEW else "")
