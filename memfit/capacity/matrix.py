"""The matrix of a capacity plan: words in, rows and changes out. Pure."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from memfit.capacity.table import Setting
from memfit.errors import UsageError
from memfit.records import Parameter, Precision

CHECKPOINTING = (
    "checkpointing",
    "activation_checkpointing",
    "gradient_checkpointing",
    "grad_checkpointing",
    "checkpoint",
    "use_checkpointing",
    "use_checkpoint",
    "recompute",
)
"""Names under which workloads offer to recompute activations."""
ALLOCATOR_VARIABLE = "PYTORCH_CUDA_ALLOC_CONF"
EXPANDABLE = "expandable_segments:True"
MOST_CELLS = 600
"""A larger matrix is a slip of the keyboard more often than a plan."""

Item = TypeVar("Item")


def words_of(option: str, text: str) -> tuple[str, ...]:
    """Split a list at its commas.

    Raises:
        UsageError: When it is empty, or has an empty place or the same word twice.
    """
    words = tuple(word.strip() for word in text.split(","))
    if not any(words):
        raise UsageError(f"{option} names nothing", hint="separate values by commas")
    if not all(words):
        raise UsageError(f"{option} {text} has an empty place", hint="one comma between values")
    refuse_twice(option, words)
    return words


def refuse_twice(option: str, values: Sequence[object]) -> None:
    """Raise a UsageError when a value is there more than once."""
    for value in values:
        if values.count(value) > 1:
            raise UsageError(f"{option} names {value} twice", hint="name each value once")


def parameter_lists(settings: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Read `NAME=VALUE,VALUE` of every `--set`."""
    lists: dict[str, tuple[str, ...]] = {}
    for setting in settings:
        name, equals, values = setting.partition("=")
        if not equals or not name:
            raise UsageError(
                f"--set {setting} is not NAME=VALUE,VALUE", hint="as in --set seq_len=1024,2048"
            )
        if name in lists:
            raise UsageError(
                f"--set {name} is given twice", hint=f"as in --set {name}={values},VALUE"
            )
        lists[name] = words_of(f"--set {name}", values)
    return lists


def precisions_of(text: str) -> tuple[Precision, ...]:
    """Read the list of `--precision`."""
    known = [str(precision) for precision in Precision]
    words = words_of("--precision", text)
    for word in words:
        if word not in known:
            raise UsageError(f"there is no precision {word!r}", hint=f"one of {', '.join(known)}")
    return tuple(Precision(word) for word in words)


def counts_of(option: str, text: str) -> tuple[int, ...]:
    """Read a list of whole numbers above zero."""
    numbers = []
    for word in words_of(option, text):
        if not word.isdecimal() or int(word) < 1:
            raise UsageError(f"{option} names {word!r}; it takes whole numbers from 1 on")
        numbers.append(int(word))
    refuse_twice(option, numbers)
    return tuple(numbers)


def settings_of(
    parameters: Mapping[str, Sequence[str]],
    precisions: Sequence[Precision],
    replicas: Sequence[int],
) -> tuple[Setting, ...]:
    """List the rows: every combination, the last word changing first."""
    names = list(parameters)
    return tuple(
        Setting(parameters=dict(zip(names, values, strict=True)), precision=precision, replicas=d)
        for values in itertools.product(*parameters.values())
        for precision in precisions
        for d in replicas
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One thing that `--try` changes in every cell where it is not so already."""

    name: str
    """As it is shown: `checkpointing=True`, `bf16`, `expandable segments`."""
    parameters: dict[str, str] = field(default_factory=dict)
    precision: Precision | None = None
    environment: dict[str, str] = field(default_factory=dict)

    def apply(self, setting: Setting, values: Mapping[str, Parameter]) -> Setting | None:
        """Return the changed setting, or None where it changes nothing.

        Args:
            setting: The setting of the cell.
            values: All parameters of the workload in that setting.
        """
        if self.precision is not None:
            if setting.precision is not Precision.FP32:
                return None
            return replace(setting, precision=self.precision)
        if self.parameters:
            if all(str(values.get(name)) == value for name, value in self.parameters.items()):
                return None
            return replace(setting, parameters={**setting.parameters, **self.parameters})
        return setting


def changes_of(
    words: Sequence[str], values: Mapping[str, Parameter], *, allocator: str
) -> tuple[tuple[Change, ...], tuple[str, ...]]:
    """Read `--try`: what may buy room in this workload.

    Args:
        words: `checkpointing`, `allocator`, `precision`, the name of a switch, or NAME=VALUE.
        values: The workload's parameters.
        allocator: The allocator's settings in the environment, empty where there are none.

    Returns:
        The changes, and a sentence for each word that this workload gives nothing to change.

    Raises:
        UsageError: When a word is neither known nor a parameter.
    """
    changes, said = [], []
    for word in words:
        name, equals, value = word.partition("=")
        switch = word if isinstance(values.get(word), bool) else None
        if word == "precision":
            changes.append(Change(name="bf16", precision=Precision.BF16))
        elif word == "allocator":
            if EXPANDABLE in allocator:
                said.append(f"--try allocator changes nothing: {EXPANDABLE} is set already")
                continue
            joined = ",".join(part for part in (allocator, EXPANDABLE) if part)
            environment = {ALLOCATOR_VARIABLE: joined}
            changes.append(Change(name="expandable segments", environment=environment))
        elif equals and name in values:
            changes.append(Change(name=word, parameters={name: value}))
        elif switch or word == "checkpointing":
            found = switch or _checkpointing(values)
            if found is None:
                said.append(
                    "--try checkpointing: the workload has no such parameter "
                    "(a field such as `checkpointing: bool = False`), so it was not tried"
                )
                continue
            flipped = str(not values[found])
            changes.append(Change(name=f"{found}={flipped}", parameters={found: flipped}))
        else:
            known = ["checkpointing", "allocator", "precision", *values]
            near = difflib.get_close_matches(name, dict.fromkeys(known), n=3)
            parameters = f" of {', '.join(values)}" if values else ""
            raise UsageError(
                f"--try {word}: there is nothing of that name to try",
                hint=f"did you mean {' or '.join(near)}?"
                if near
                else "it is checkpointing, allocator, precision, or a parameter's NAME=VALUE"
                + parameters,
            )
    return tuple(changes), tuple(said)


def _checkpointing(values: Mapping[str, Parameter]) -> str | None:
    return next((name for name in CHECKPOINTING if values.get(name) is False), None)
