"""The plan of a training run: the answer of a probe, as a training script uses it.

    plan = memfit.load("memfit.json")
    plan.check(world_size=dist.get_world_size(), logical_batch=512)
    for microbatch in plan.microbatches(batch):
        ...

Nothing here imports torch: tensors are whatever has a shape and can be sliced.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit.allocator import NEW_VARIABLE, includes, settings_of, variable_for
from memfit.batch import weights
from memfit.errors import UsageError
from memfit.records import Precision, ProbeResult, Split, from_json

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How to run one accumulation group on the device that was probed."""

    split: Split
    precision: Precision = Precision.FP32
    clip_norm: float | None = None
    """Norm to which the whole gradient is clipped once per group; None for no clipping."""
    allocator: str | None = None
    """Settings of PyTorch's allocator that the microbatch fits with; None for any."""
    allocator_variable: str = NEW_VARIABLE
    """The environment variable that the probed version of torch reads them from."""

    @classmethod
    def of(cls, result: ProbeResult, *, tuned: bool = False) -> Plan:
        """Take the plan from the answer of a probe.

        Args:
            result: The answer.
            tuned: Take the larger split that fits with another setting of the allocator.

        Raises:
            UsageError: When `tuned` is asked for and no larger split was found.
        """
        split, setting = result.split, result.spec.allocator
        if tuned:
            if result.tuned is None or result.tuned.split is None:
                raise UsageError(
                    "the probe found no larger microbatch with another setting of the allocator",
                    hint="take the plan without tuned",
                )
            split, setting = result.tuned.split, result.tuned.allocator
        return cls(
            split=split,
            precision=result.spec.precision,
            clip_norm=result.spec.clip_norm,
            allocator=setting,
            allocator_variable=variable_for(result.environment.torch),
        )

    @property
    def microbatch(self) -> int:
        """The largest microbatch, in examples."""
        return self.split.microbatch

    @property
    def accumulation_steps(self) -> int:
        """Microbatches whose gradients one optimizer step consumes."""
        return self.split.accumulation_steps

    @property
    def replicas(self) -> int:
        """Data-parallel replicas."""
        return self.split.replicas

    @property
    def logical_batch(self) -> int | None:
        """Examples of one optimizer step over all replicas; None when none was asked for."""
        return self.split.logical_batch

    @property
    def per_replica(self) -> int | None:
        """Examples of one optimizer step on one replica; None without a logical batch."""
        return None if self.logical_batch is None else self.logical_batch // self.replicas

    def check(self, world_size: int, *, logical_batch: int | None = None) -> None:
        """Refuse to train in another setting than the one that was probed.

        Args:
            world_size: Data-parallel replicas of the run: processes, where each is a replica.
            logical_batch: Examples that one optimizer step is to consume, or None not to check.

        Raises:
            UsageError: When one of them differs from the plan's, or the microbatch fits only with
                settings of the allocator that this process's environment does not have.
        """
        if self.allocator is not None and not includes(settings_of(os.environ), self.allocator):
            raise UsageError(
                f"the plan's microbatch fits only with {self.allocator}, which this process's "
                "environment does not set",
                hint=f"export {self.allocator_variable}={self.allocator} before training starts",
            )
        if world_size != self.replicas:
            raise UsageError(
                f"the plan is for {_plural(self.replicas, 'replica')}, and this run has "
                f"{world_size}",
                hint=f"probe again with --replicas {world_size}",
            )
        if logical_batch is not None and logical_batch != self.logical_batch:
            planned = "none" if self.logical_batch is None else str(self.logical_batch)
            raise UsageError(
                f"the plan's logical batch is {planned}, and this run has {logical_batch}",
                hint=f"probe again with --replicas {world_size} and the logical batch "
                f"{logical_batch}",
            )

    def counts(self, examples: int | None = None) -> tuple[int, ...]:
        """Return the sizes of the microbatches of one replica's group, the larger ones first.

        Args:
            examples: Examples that this replica has; a full group when None. Fewer, as in the last
                group of an epoch, are split into as few microbatches, as equal as possible.

        Raises:
            UsageError: When there are none, or more than the replica's share.
        """
        if examples is None:
            return self.split.sizes
        if examples < 1:
            raise UsageError(f"a group needs at least 1 example, and got {examples}")
        share = self.per_replica
        if share is not None and examples > share:
            raise UsageError(
                f"a replica's share of the logical batch is {share} examples, and got {examples}",
                hint=f"the logical batch is {self.logical_batch} over {self.replicas}; give each "
                "replica its own share of it",
            )
        steps = -(-examples // self.microbatch)
        base, larger = divmod(examples, steps)
        return (base + 1,) * larger + (base,) * (steps - larger)

    def weights(
        self, counts: Sequence[int | float] | None = None, *, total: float | None = None
    ) -> tuple[float, ...]:
        """Return the factor by which each microbatch's mean loss is multiplied.

        Args:
            counts: Elements that the mean of each microbatch is over, on this replica; the
                examples of a full group when None.
            total: Elements of the whole group on all replicas; needed with `counts` when there is
                more than one replica.

        Raises:
            UsageError: When the counts or their total make no sense.
        """
        if counts is None:
            counts = self.counts()
            total = sum(counts) * self.replicas if total is None else total
        return weights(counts, total=total, replicas=self.replicas)

    def microbatches(self, batch: Any) -> Iterator[Any]:
        """Cut one replica's share of the logical batch into the plan's microbatches.

        Tensors and arrays are sliced along their first dimension. Mappings and tuples keep their
        form, and so does a list that holds tensors. Any other sequence, such as a list of strings
        or of dictionaries, is taken as one item per example. Numbers, None, strings and tensors
        without a dimension go to every microbatch as they are.

        Raises:
            UsageError: When the parts disagree on the number of examples, nothing in the batch has
                examples, or there are more than the replica's share.
        """
        examples = _examples(batch)
        sizes = self.counts(examples)
        return _slices(batch, sizes)


def load(path: str | os.PathLike[str], *, tuned: bool = False) -> Plan:
    """Read the plan from the file that a probe wrote.

    Args:
        path: The file.
        tuned: Take the larger split that fits with another setting of the allocator.

    Raises:
        UsageError: When the file cannot be read or is not the result of a probe.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise UsageError(
            f"cannot read {os.fspath(path)}: {error.strerror or error}",
            hint="`memfit probe` writes it",
        ) from None
    return Plan.of(from_json(data, ProbeResult, origin=os.fspath(path)), tuned=tuned)


def _slices(batch: Any, sizes: Sequence[int]) -> Iterator[Any]:
    start = 0
    for size in sizes:
        yield _cut(batch, slice(start, start + size))
        start += size


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "__getitem__")


def _is_constant(value: Any) -> bool:
    """Whether the value has no examples and goes to every microbatch as it is."""
    if _is_tensor(value):
        return len(value.shape) == 0
    return value is None or isinstance(value, bool | int | float | complex | str | bytes)


def _children(value: Any) -> list[Any] | None:
    """Return the parts of a structure, or None for a leaf."""
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, tuple) and (
        hasattr(value, "_fields") or not all(_is_constant(item) for item in value)
    ):
        return list(value)
    if isinstance(value, list) and any(_is_tensor(item) and len(item.shape) for item in value):
        return list(value)
    return None


def _lengths(value: Any) -> Iterator[int]:
    children = _children(value)
    if children is not None:
        for child in children:
            yield from _lengths(child)
    elif _is_tensor(value) and len(value.shape):
        yield int(value.shape[0])
    elif not _is_constant(value):
        if not (hasattr(value, "__len__") and hasattr(value, "__getitem__")):
            raise UsageError(
                f"cannot cut a {type(value).__name__} into microbatches: it has no length or "
                "cannot be sliced",
                hint="slice the batch yourself, by the sizes that plan.counts() returns",
            )
        yield len(value)


def _examples(batch: Any) -> int:
    found = sorted(set(_lengths(batch)))
    if not found:
        raise UsageError(f"a batch of type {type(batch).__name__} has nothing to cut")
    if len(found) > 1:
        numbers = " and ".join(str(number) for number in found)
        raise UsageError(
            f"the parts of the batch disagree on the number of examples: {numbers}",
            hint="slice the batch yourself, by the sizes that plan.counts() returns",
        )
    return found[0]


def _cut(value: Any, part: slice) -> Any:
    children = _children(value)
    if children is None:
        return value if _is_constant(value) else value[part]
    cut = [_cut(child, part) for child in children]
    if isinstance(value, Mapping):
        return _mapping_like(value, dict(zip(value, cut, strict=True)))
    if hasattr(value, "_fields"):
        return type(value)(*cut)
    return tuple(cut) if isinstance(value, tuple) else cut


def _mapping_like(original: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """Keep the mapping's own type where it can be built from a dictionary."""
    if type(original) is dict:
        return items
    kind: Any = type(original)
    try:
        return kind(items)
    except TypeError:
        return items


def _plural(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
