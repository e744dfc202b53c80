"""From words to a device: which one is meant, and how much of it may be used. Imports no torch."""

from __future__ import annotations

import contextlib
import importlib.util
import platform
from dataclasses import dataclass
from pathlib import Path

import psutil

from memfit import virtual
from memfit.devices.cgroup import levels, lowest_limit
from memfit.devices.nvml import Nvml
from memfit.errors import CannotJudge, UsageError
from memfit.records import DeviceKind, DeviceSpec
from memfit.units import TIB, format_bytes, parse_bytes, parse_share

DEFAULT_HEADROOM = "2%"
"""Kept free unless the user says otherwise: runs drift, and contexts grow as kernels load."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The device that the user's word means."""

    kind: DeviceKind
    slug: str
    card: virtual.Card | None = None
    """The card to imitate, for a virtual GPU."""
    said: str | None = None
    """What `auto` chose and why, in a sentence; None when the user named the device."""


def choose(word: str) -> Choice:
    """Find the device that `auto`, `cuda`, `cpu`, the name of a card or a card file means.

    Raises:
        UsageError: When it is no device and no card.
        CannotJudge: When it is named but this machine does not have it.
    """
    plain = word.strip().lower()
    if plain == "cpu":
        return Choice(kind=DeviceKind.CPU, slug="cpu")
    if plain == "cuda":
        if not Nvml().gpus():
            raise CannotJudge(
                "there is no CUDA device here: NVML finds no GPU",
                hint="name a card to imitate, such as --device rtx-4090, or use --device cpu",
            )
        return Choice(kind=DeviceKind.CUDA, slug="cuda")
    if plain != "auto":
        card = virtual.find_card(word)
        reason = virtual.unavailable_reason()
        if reason is not None:
            raise CannotJudge(f"no virtual GPU: {reason}", hint="`memfit doctor` says more")
        return Choice(kind=DeviceKind.VIRTUAL, slug=card.slug, card=card)
    return _choose_by_itself()


def _choose_by_itself() -> Choice:
    gpus = Nvml().gpus()
    if gpus and torch_has_cuda():
        return Choice(
            kind=DeviceKind.CUDA, slug="cuda", said=f"using the GPU of this machine, {gpus[0].name}"
        )
    reason = virtual.unavailable_reason()
    if reason is None:
        card = virtual.find_card(virtual.DEFAULT_CARD)
        return Choice(
            kind=DeviceKind.VIRTUAL,
            slug=card.slug,
            card=card,
            said=f"there is no GPU here: using a virtual {card.name} (--device names another card)",
        )
    return Choice(
        kind=DeviceKind.CPU, slug="cpu", said=f"there is no GPU here, and {reason}: using the CPU"
    )


def torch_has_cuda() -> bool:
    """Whether the installed torch is a CUDA build, told without importing it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    version = Path(spec.origin).with_name("version.py")
    with contextlib.suppress(OSError):
        return any(
            line.startswith("cuda") and "None" not in line
            for line in version.read_text().splitlines()
        )
    return False


def describe(
    choice: Choice,
    *,
    memory_limit: str | None,
    headroom: str = DEFAULT_HEADROOM,
    memory: str | None = None,
    gpu: tuple[str, int, str] | None = None,
) -> DeviceSpec:
    """Describe the chosen device and the limit on its memory.

    Args:
        choice: The device.
        memory_limit: The most that may be used, such as `20GiB`; None for all of it.
        headroom: What is kept free of that, in bytes or percent.
        memory: Total memory of a virtual GPU in the place of its card's, more or less than that.
        gpu: For a real GPU, what CUDA says: name, total bytes, compute capability.

    Raises:
        UsageError: When the limit is above the device's memory, or leaves no room, or when the
            total of a device that is not virtual is to be set.
    """
    context, context_source, capability = None, None, None
    if choice.card is not None:
        card = choice.card
        name, total, capability = card.shown_name, card.total_bytes, card.compute_capability
        if memory is not None:
            total = _set_total(memory)
            name = f"{name} with {format_bytes(total)} set by --memory"
        available = total
        context, context_source = virtual.context_charge(card)
    elif gpu is not None:
        name, total, capability = gpu
        available = total
    else:
        name, total = _host_name(), host_total_bytes()
        available = min(total, int(psutil.virtual_memory().available))
    if memory is not None and choice.card is None:
        raise UsageError(
            f"--memory sets the size of a virtual GPU, and {name} is real",
            hint="use --memory-limit to use less of it, or name a card with --device",
        )
    asked = parse_bytes(memory_limit) if memory_limit is not None else None
    if asked is not None and asked > total:
        raise UsageError(
            f"--memory-limit {memory_limit} is above the {format_bytes(total)} of {name}",
            hint="leave it out to use the whole device, or name a larger card",
        )
    base = available if asked is None else asked
    kept = parse_share(headroom, base)
    if kept and kept >= base:
        raise UsageError(
            f"--headroom {headroom} leaves nothing of the {format_bytes(base)} that may be used",
            hint="lower --headroom, or raise --memory-limit" if asked else "lower --headroom",
        )
    limit = base - kept
    floor = context or 0
    if limit <= floor:
        raise UsageError(
            f"a limit of {format_bytes(limit)} ({format_bytes(base)} less {format_bytes(kept)} of "
            f"headroom) leaves nothing beside the CUDA context of {format_bytes(floor)}"
            if floor
            else f"a limit of {format_bytes(base)} is nothing",
            hint=_roomier(memory_limit, memory),
        )
    return DeviceSpec(
        kind=choice.kind,
        slug=choice.slug,
        name=name,
        total_bytes=total,
        limit_bytes=limit,
        memory_limit_bytes=asked,
        headroom_bytes=kept,
        context_bytes=context,
        context_source=context_source,
        compute_capability=capability,
    )


def _set_total(memory: str) -> int:
    """Read what `--memory` says, and refuse what no virtual GPU can have."""
    total = parse_bytes(memory)
    if total > TIB:
        raise UsageError(f"--memory {memory} is more than a virtual GPU can have (1 TiB)")
    return total


def _host_name() -> str:
    return f"CPU ({platform.machine()}, {psutil.cpu_count() or 1} cores)"


def host_total_bytes() -> int:
    """Host memory that this process could use: the machine's, or its control group's if less."""
    total = int(psutil.virtual_memory().total)
    group = lowest_limit(levels())
    return total if group is None else min(total, group.limit_bytes or total)


def _roomier(memory_limit: str | None, memory: str | None) -> str:
    """Say what would leave more room."""
    for option, given in (("--memory-limit", memory_limit), ("--memory", memory)):
        if given is not None and given.strip().isdigit() and int(given):
            return f"a number alone is bytes: did you mean {option} {given.strip()}GiB?"
    if memory is None:
        return "raise --memory-limit or lower --headroom"
    return "raise --memory, or lower --headroom"
