"""Settings of PyTorch's caching allocator: their words, their variable, and how they are combined.

Imports no torch but where a worker applies them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from enum import StrEnum

EXPANDABLE = "expandable_segments:True"
"""Segments that grow in place, so that free memory lies together (PyTorch's CUDA notes)."""
NEW_VARIABLE = "PYTORCH_ALLOC_CONF"
OLD_VARIABLE = "PYTORCH_CUDA_ALLOC_CONF"
_SINCE = (2, 9)
"""First torch that reads the new variable; it takes the old one still."""


class AllocatorChoice(StrEnum):
    """Which settings of the allocator a probe tries."""

    AUTO = "auto"
    """Both on a virtual GPU, where it costs little; else the environment's own."""
    DEFAULT = "default"
    """What the environment says."""
    EXPANDABLE = "expandable"
    BOTH = "both"


def variable_for(torch: str) -> str:
    """Name the variable that a version of torch reads, such as `2.7.1+cu126`."""
    found = re.match(r"(\d+)\.(\d+)", torch)
    version = (int(found[1]), int(found[2])) if found else _SINCE
    return NEW_VARIABLE if version >= _SINCE else OLD_VARIABLE


def settings_of(environment: Mapping[str, str]) -> str:
    """Return the allocator's settings in an environment; the new variable goes first."""
    return environment.get(NEW_VARIABLE) or environment.get(OLD_VARIABLE) or ""


def combined(present: str, added: str) -> str:
    """Add settings to those that are there; a setting given anew replaces the old one.

    Values may hold commas in brackets, as in `roundup_power2_divisions:[256:1,512:2]`.
    """
    parts = {_name(part): part for part in _split(present)}
    parts.update({_name(part): part for part in _split(added)})
    return ",".join(parts.values())


def includes(present: str, wanted: str) -> bool:
    """Whether all wanted settings are among those that are present, whatever the spelling."""
    have = {_plain(part) for part in _split(present)}
    return all(_plain(part) in have for part in _split(wanted))


def apply(setting: str) -> None:
    """Add a setting to those of this process's environment; before CUDA is first used."""
    import torch  # noqa: PLC0415

    whole = combined(settings_of(os.environ), setting)
    set_settings = getattr(torch._C, "_accelerator_setAllocatorSettings", None)  # noqa: SLF001
    if set_settings is None:
        set_settings = torch.cuda.memory._set_allocator_settings  # noqa: SLF001
    set_settings(whole)


def _split(settings: str) -> list[str]:
    return [part.strip() for part in re.split(r",(?![^\[]*\])", settings) if part.strip()]


def _name(part: str) -> str:
    return part.partition(":")[0].strip()


def _plain(part: str) -> str:
    return re.sub(r"\s", "", part).lower()
