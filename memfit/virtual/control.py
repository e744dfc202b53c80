"""The worker's side of the virtual GPU: questions to the driver that this process has loaded."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

Listener = Callable[[int, int], None]
"""Told of a host read of device memory: its bytes, and one of the kinds below."""
CERTAIN, CHANGED, UNKNOWN, ANSWERED = range(4)
"""Kinds of reads: of what was written and left alone; of what a kernel may have changed since; of
what only a kernel could have written; and those that were answered by `answer_*` or a tape."""

_LISTENER = ctypes.CFUNCTYPE(None, ctypes.c_size_t, ctypes.c_int)
_listener: object = None
"""Kept, because the driver holds no reference to it."""


@cache
def _driver() -> ctypes.CDLL | None:
    """Return the process's own symbols when the stand-in driver is among them."""
    process = ctypes.CDLL(None)
    try:
        process.memfit_vgpu_set_total.argtypes = [ctypes.c_size_t]
        process.memfit_vgpu_used.argtypes = [ctypes.c_int]
        process.memfit_vgpu_used.restype = ctypes.c_size_t
        process.memfit_vgpu_unknown_calls.restype = ctypes.c_size_t
        process.memfit_vgpu_benchmarked.argtypes = [ctypes.POINTER(ctypes.c_size_t)] * 2
        process.memfit_vgpu_benchmarked.restype = ctypes.c_size_t
        process.memfit_vgpu_rounding.argtypes = [ctypes.c_int]
        process.memfit_vgpu_rounding.restype = ctypes.c_size_t
        process.memfit_vgpu_unknown_names.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
        process.memfit_vgpu_unknown_names.restype = ctypes.c_size_t
        _declare_reads(process)
    except AttributeError:
        return None
    return process


def _declare_reads(process: ctypes.CDLL) -> None:
    size, address = ctypes.c_size_t, ctypes.c_void_p
    for name, arguments, result in (
        ("listen", [_LISTENER], None),
        ("unknown_reads", [], size),
        ("mismatched_reads", [], size),
        ("answer_bytes", [address, size], ctypes.c_int),
        ("answer_count", [ctypes.c_int64], ctypes.c_int),
        ("drop_answers", [], size),
        ("poke", [address, address, size], None),
        ("peek", [address, address, size], ctypes.c_int),
        ("record", [], None),
        ("tape", [ctypes.c_char_p, size], size),
        ("play", [ctypes.c_char_p, size], ctypes.c_int),
        ("tape_position", [], size),
        ("tape_seek", [size], None),
    ):
        function = getattr(process, f"memfit_vgpu_{name}")
        function.argtypes, function.restype = arguments, result


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


def card_was_read() -> bool:
    """Return whether this process has looked at its virtual card, so that it can have no other."""
    return bool(_loaded().memfit_vgpu_card_was_read())


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


def benchmarked() -> tuple[int, int, int]:
    """Return what cuDNN's benchmark mode did.

    Returns:
        For how many convolutions several plans were tried; the least and most workspace, in
        bytes, among those of the one whose plans differ most.
    """
    least, most = ctypes.c_size_t(), ctypes.c_size_t()
    tried = _loaded().memfit_vgpu_benchmarked(ctypes.byref(least), ctypes.byref(most))
    return int(tried), least.value, most.value


def rounding_bytes(device: int = 0) -> int:
    """Return how much of the most that was allocated is rounding up to pages of 2 MiB.

    PyTorch's own allocator asks for whole pages; a driver's memory pools pack smaller blocks.
    """
    return int(_loaded().memfit_vgpu_rounding(device))


def listen(listener: Listener | None) -> None:
    """Have a function told of every host read of device memory, or nobody any more.

    It is called while the read happens, on the thread that reads, and may end the process.
    """
    global _listener  # noqa: PLW0603 - one driver, one listener
    wrapped = _LISTENER(listener) if listener is not None else _LISTENER()
    _loaded().memfit_vgpu_listen(wrapped)
    _listener = wrapped


def unknown_reads() -> int:
    """Return how often host code read device memory that only a kernel could have written."""
    return int(_loaded().memfit_vgpu_unknown_reads())


def mismatched_reads() -> int:
    """Return how many reads the tape that is played had no answer for."""
    return int(_loaded().memfit_vgpu_mismatched_reads())


def answer_bytes(address: int, size: int) -> None:
    """Answer this thread's next reads from host memory, which the caller keeps alive."""
    _loaded().memfit_vgpu_answer_bytes(address, size)


def answer_count(count: int) -> None:
    """Answer this thread's next read with an integer, in the size that is read."""
    _loaded().memfit_vgpu_answer_count(count)


def drop_answers() -> int:
    """Drop the answers that were not asked for, and return how many there were."""
    return int(_loaded().memfit_vgpu_drop_answers())


def poke(address: int, source: int | None, size: int) -> None:
    """Put a small value into device memory, or with None make what is there unknown."""
    _loaded().memfit_vgpu_poke(address, source, size)


def peek(target: int, address: int, size: int) -> bool:
    """Copy a small value out of device memory to the host; False when it is unknown."""
    return bool(_loaded().memfit_vgpu_peek(target, address, size) == 0)


def record_reads() -> None:
    """Keep the answer of every read from now on."""
    _loaded().memfit_vgpu_record()


def tape() -> bytes:
    """Return the answers that were recorded, in order."""
    size = int(_loaded().memfit_vgpu_tape(None, 0))
    data = ctypes.create_string_buffer(size)
    _loaded().memfit_vgpu_tape(data, size)
    return data.raw


def play_reads(recorded: bytes) -> None:
    """Answer every read from now on with what was recorded, in order."""
    if _loaded().memfit_vgpu_play(recorded, len(recorded)) != 0:
        raise MemoryError


def tape_position() -> int:
    """Return where in the tape the next read is."""
    return int(_loaded().memfit_vgpu_tape_position())


def seek_tape(position: int) -> None:
    """Go on at a position that `tape_position` returned while it was recorded."""
    _loaded().memfit_vgpu_tape_seek(position)
