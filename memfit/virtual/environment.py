"""From a card to the environment of a worker process that runs on it."""

from __future__ import annotations

import os
import re
from pathlib import Path

from memfit.errors import UsageError
from memfit.units import TIB, format_bytes
from memfit.virtual.build import driver_folder
from memfit.virtual.catalogue import Card, context_charge

MOST_DEVICES = 16
CARD_VARIABLE = "MEMFIT_VGPU_CARD"
"""Describes the card to the driver, which reads it when a process first asks for its device."""


def prepare(card: Card, *, total_bytes: int, devices: int = 1) -> dict[str, str]:
    """Build the driver, or find it in the cache, and describe the card to it.

    Args:
        card: The card to stand in for.
        total_bytes: Memory of each device; usually the card's own.
        devices: How many devices the worker sees.

    Returns:
        Environment variables for the worker process, to be set before it starts.

    Raises:
        CannotJudge: When the driver cannot be built or kept here.
        UsageError: When the sizes make no sense.
    """
    context, _ = context_charge(card)
    if not 1 <= devices <= MOST_DEVICES:
        raise UsageError(
            f"{devices} virtual devices were asked for; there can be 1 to {MOST_DEVICES}"
        )
    if total_bytes <= context:
        raise UsageError(
            f"{format_bytes(total_bytes)} is no more than the CUDA context of the card takes "
            f"({format_bytes(context)})"
        )
    if total_bytes > TIB:
        raise UsageError(f"{format_bytes(total_bytes)} is more than a virtual GPU can have (1 TiB)")
    return {
        **loading(driver_folder(), devices=devices),
        CARD_VARIABLE: describe(card, total_bytes=total_bytes, context=context, devices=devices),
    }


def loading(folder: Path, *, devices: int = 1) -> dict[str, str]:
    """Return the variables that load the driver into a process, which has no card by them.

    Args:
        folder: The driver's.
        devices: How many devices the process sees.
    """
    return {
        "LD_PRELOAD": _joined(_preload(folder), "LD_PRELOAD"),
        "LD_LIBRARY_PATH": _joined(str(folder), "LD_LIBRARY_PATH"),
        "TRITON_LIBCUDA_PATH": str(folder),
        "CUDA_VISIBLE_DEVICES": ",".join(str(device) for device in range(devices)),
        # torch.cuda.is_available() asks NVML, so that it may be called before a fork.
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    }


def shared_by(folder: Path) -> dict[str, str]:
    """Make one machine of all processes that get these variables beside those of `prepare`.

    They see each other's memory on the devices, and ranks that run in them meet.

    Args:
        folder: A folder that exists, for what they share; to be removed when they have ended.
    """
    return {"MEMFIT_VGPU_MACHINE": str(folder.absolute())}


def describe(card: Card, *, total_bytes: int, context: int, devices: int) -> str:
    """Write the card as the driver reads it."""
    major, minor = card.capability
    fields = {
        "name": card.name,
        "major": major,
        "minor": minor,
        "sms": card.sms,
        "smem_sm": card.smem_per_sm_bytes,
        "smem_block": card.smem_optin_bytes,
        "l2": card.l2_bytes,
        "total": total_bytes,
        "context": context,
        "devices": devices,
    }
    return ";".join(f"{key}={value}" for key, value in fields.items())


def _preload(folder: Path) -> str:
    """Name the library for LD_PRELOAD, where a space separates names: then without its folder."""
    library = folder / "libcuda.so.1"
    return library.name if re.search(r"\s", str(library)) else str(library)


def _joined(first: str, variable: str) -> str:
    """Put a value in front of what the variable already holds."""
    others = [part for part in os.environ.get(variable, "").split(":") if part not in ("", first)]
    return ":".join([first, *others])
