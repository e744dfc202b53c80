"""The worker's side of the virtual GPU: questions to the driver that this process has loaded."""

from __future__ import annotations

import ctypes
from functools import cache


@cache
def _driver() -> ctypes.CDLL | None:
    """Return the process's own symbols when the stand-in driver is among them."""
    process = ctypes.CDLL(None)
    try:
        process.memfit_vgpu_set_total.argtypes = [ctypes.c_size_t]
        process.memfit_vgpu_used.argtypes = [ctypes.c_int]
        process.memfit_vgpu_used.restype = ctypes.c_size_t
        process.memfit_vgpu_unknown_calls.restype = ctypes.c_size_t
        process.memfit_vgpu_unknown_names.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
        process.memfit_vgpu_unknown_names.restype = ctypes.c_size_t
    except AttributeError:
        return None
    return process


def active() -> bool:
    """Return whether the stand-in driver is loaded in this process."""
    return _driver() is not None


def _loaded() -> ctypes.CDLL:
    driver = _driver()
    if driver is None:
        raise RuntimeError("the virtual GPU's driver is not loaded in this process")
    return driver


def set_total_bytes(total: int) -> None:
    """Set the memory of every virtual device.

    Raises:
        ValueError: When memory was already allocated, or the size is not above the context's.
        RuntimeError: When the driver is not loaded.
    """
    if _loaded().memfit_vgpu_set_total(total) != 0:
        raise ValueError(
            f"the virtual GPU does not take a size of {total} bytes: "
            "it is too small, or memory was already allocated"
        )


def used_bytes(device: int = 0) -> int:
    """Return the memory in use on a device, context included."""
    return int(_loaded().memfit_vgpu_used(device))


def unknown_calls() -> int:
    """Return how many calls had results that the driver had to invent."""
    return int(_loaded().memfit_vgpu_unknown_calls())


def unknown_names() -> tuple[str, ...]:
    """Return the functions whose results the driver had to invent, in order of first use."""
    text = ctypes.create_string_buffer(1 << 16)
    _loaded().memfit_vgpu_unknown_names(text, len(text))
    return tuple(text.value.decode().split())


def asks_cudnn() -> bool:
    """Return whether convolution plans and workspaces come from the real cuDNN.

    False with a cuDNN before 9.8, which cannot plan for a device that is not there: convolutions
    then count no workspace.
    """
    return bool(_loaded().memfit_vgpu_cudnn_plans())
