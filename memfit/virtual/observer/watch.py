"""Observes one process that has imported torch, and writes what it saw into the run's folder.

Nothing here allocates on the device, resets a counter or changes what the program reads. The
allocator's peaks are read at the first optimizer step, before the program itself resets them, and
at the end. The report is written whole, under a temporary name and renamed: when CUDA starts, at
optimizer steps, at an out-of-memory error and at the end, so that a process that is killed leaves
its last one. It knows nothing of memfit but the names of the stand-in driver's functions.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import json
import os
import sys
import time
import types
from collections.abc import Callable
from typing import Any

_WRITE_S = 0.25
"""After the first two steps, the report is not written more often than this."""
_MOST_PLACES = 50
"""Of the places at which a program reads what is not known, the first so many are told."""
_CHANGED, _UNKNOWN = 1, 2
"""Kinds of reads, as the stand-in driver numbers them."""
_MOST_ERRORS = 100
"""A program may survive its out-of-memory errors: those beyond this many are only counted."""

Peaks = dict[str, Any]


class _Driver:
    """The questions that the stand-in driver answers; `virtual` is False where it is not loaded."""

    def __init__(self) -> None:
        self._process = ctypes.CDLL(None)
        self._listener: object = None  # kept, because the driver holds no reference to it
        self.virtual = hasattr(self._process, "memfit_vgpu_used")
        if self.virtual:
            for name in ("used_peak", "held_peak", "unknown_calls", "benchmarked", "rounding"):
                getattr(self._process, f"memfit_vgpu_{name}").restype = ctypes.c_size_t

    def used(self, device: int) -> tuple[int, bool]:
        """Bytes in use on a device at most, by all processes of the run, and whether any by us."""
        held = int(self._process.memfit_vgpu_held_peak(device))
        return int(self._process.memfit_vgpu_used_peak(device)), held > 0

    def invented(self) -> tuple[int, list[str]]:
        """Calls whose results were invented, and the functions that were called."""
        if not self.virtual:
            return 0, []
        text = ctypes.create_string_buffer(1 << 16)
        self._process.memfit_vgpu_unknown_names(text, ctypes.c_size_t(len(text)))
        calls = int(self._process.memfit_vgpu_unknown_calls())
        return calls, text.value.decode().split()

    def benchmark(self) -> list[int]:
        """What cuDNN's benchmark mode tried, and the least and most workspace of one choice."""
        if not self.virtual:
            return [0, 0, 0]
        least, most = ctypes.c_size_t(), ctypes.c_size_t()
        tried = self._process.memfit_vgpu_benchmarked(ctypes.byref(least), ctypes.byref(most))
        return [int(tried), least.value, most.value]

    def rounding(self, devices: list[int]) -> int:
        """Bytes of the devices' peaks that round blocks up to whole pages."""
        if not self.virtual:
            return 0
        return max((int(self._process.memfit_vgpu_rounding(d)) for d in devices), default=0)

    def listen(self, heard: Callable[[int, int], None] | None) -> None:
        """Have a function told of every read of device memory by the host, or nobody."""
        if self.virtual:
            kind = ctypes.CFUNCTYPE(None, ctypes.c_size_t, ctypes.c_int)
            self._listener = kind() if heard is None else kind(heard)
            self._process.memfit_vgpu_listen(self._listener)


class _Reads:
    """The program's reads of device memory whose value is not sure, by place."""

    def __init__(self, torch: Any) -> None:
        self._torch = os.path.dirname(torch.__file__)  # noqa: PTH120
        # Drawing random numbers again until they lie within bounds, and comparing what ranks
        # hold, goes well with any value.
        self._harmless = tuple(
            f"{self._torch}/{name}"
            for name in ("nn/init.py", "distributed/", "nn/parallel/distributed.py")
        )
        self.totals = [0, 0]
        self.places: dict[str, list[int]] = {}

    def heard(self, _size: int, kind: int) -> None:
        """Count a read where it happens."""
        if kind not in (_CHANGED, _UNKNOWN):
            return
        where = self._place()
        if where is None:
            return
        index = 0 if kind == _UNKNOWN else 1
        self.totals[index] += 1
        if where in self.places or len(self.places) < _MOST_PLACES:
            self.places.setdefault(where, [0, 0])[index] += 1

    def _place(self) -> str | None:
        """The innermost line that is not torch's; None for a read that decides nothing."""
        frame: types.FrameType | None = sys._getframe(1)  # noqa: SLF001
        while frame is not None:
            name = frame.f_code.co_filename
            if name.startswith(self._harmless):
                return None
            if name != __file__ and not name.startswith((self._torch, "<")):
                return f"{'/'.join(name.split('/')[-2:])}:{frame.f_lineno}"
            frame = frame.f_back
        return "the backward pass"

    def report(self) -> list[dict[str, Any]]:
        """What was read where."""
        return [
            {"where": where, "unknown": unknown, "changed": changed}
            for where, (unknown, changed) in self.places.items()
        ]


def _history_to_come(optimizer: Any) -> int:
    """Bytes that an L-BFGS optimizer's history lacks until it is full; 0 for any other."""
    if type(optimizer).__name__ != "LBFGS":
        return 0
    missing = 0
    for group in optimizer.param_groups:
        pair = 2 * sum(p.numel() * p.element_size() for p in group["params"])
        states = [optimizer.state[p] for p in group["params"] if p in optimizer.state]
        held = max((len(state.get("old_dirs") or ()) for state in states), default=0)
        missing += pair * max(group["history_size"] - held, 0)
    return missing


class _Watch:
    """What was seen of this process."""

    def __init__(self, torch: Any, folder: str) -> None:
        self._torch = torch
        self._bindings = torch._C  # noqa: SLF001
        self._folder = folder
        self._driver = _Driver()
        self._start()

    def _start(self) -> None:
        """Begin with nothing seen: in a new process, or in a fork, which is one of its own."""
        self._pid = os.getpid()
        self._reads = _Reads(self._torch)
        self._driver.listen(self._reads.heard)
        self._name = f"{self._pid}-{time.time_ns()}.json"
        self._steps = 0
        self._stepping: list[int] = []
        self._optimizers: set[int] = set()
        self._histories: dict[int, int] = {}
        self._moments: dict[int, list[Peaks]] = {}
        self._folded: dict[int, Peaks] = {}
        self._errors: list[dict[str, Any]] = []
        self._error_count = 0
        self._group: tuple[int | None, int | None] = (None, None)
        self._cuda = False
        self._ending: str | None = None
        self._exit_status: int | None = None
        self._exception: str | None = None
        self._written = 0.0

    def install(self) -> None:
        """Hang this watch into torch and into the process's ends."""
        hooks = sys.modules["torch.optim.optimizer"]
        hooks.register_optimizer_step_pre_hook(self._outside_graphs(self._step_begins))
        hooks.register_optimizer_step_post_hook(self._outside_graphs(self._step_ends))
        cuda = self._torch.cuda
        cuda._lazy_call(self._quietly(self._cuda_started))  # noqa: SLF001
        for name in ("_cuda_resetPeakMemoryStats", "_accelerator_resetPeakStats"):
            self._before(name, self._fold_peaks)
        for name in ("_cuda_resetAccumulatedMemoryStats", "_accelerator_resetAccumulatedStats"):
            self._before(name, self._fold_counts)
        os.register_at_fork(after_in_child=self._start)
        atexit.register(self._quietly(self._at_exit))
        leave = os._exit

        @functools.wraps(leave)
        def _exit(status: int) -> None:
            self._quietly(self._at_os_exit)(status)
            leave(status)

        os._exit = _exit  # type: ignore[assignment]

    def _before(self, name: str, do: Callable[[], None]) -> None:
        """Read what the program is about to reset."""
        reset = getattr(self._bindings, name, None)
        if reset is None:
            return
        first = self._quietly(do)

        @functools.wraps(reset)
        def wrapped(*arguments: Any) -> Any:
            first()
            return reset(*arguments)

        setattr(self._bindings, name, wrapped)

    def _quietly(self, do: Callable[..., None]) -> Callable[..., None]:
        """Keep a mistake of the observer away from the program."""

        def safe(*arguments: Any) -> None:
            try:
                do(*arguments)
            except Exception as error:  # noqa: BLE001
                sys.stderr.write(f"memfit: process {os.getpid()}: observing failed: {error!r}\n")

        return safe

    def _outside_graphs(self, do: Callable[..., None]) -> Callable[..., None]:
        """Vanish from a step that is compiled: what is traced must not depend on this watch."""
        compiling = self._torch.compiler.is_compiling
        safe = self._quietly(do)

        def hook(optimizer: object, _arguments: Any, _options: Any) -> None:
            if not compiling():
                safe(optimizer)

        return hook

    # -- what happens ------------------------------------------------------------------------

    def _cuda_started(self) -> None:
        attach = getattr(self._bindings, "_cuda_attach_out_of_memory_observer", None)
        if attach is not None:
            attach(self._quietly(self._out_of_memory))
        self._cuda = True
        self._write()

    def _step_begins(self, optimizer: object) -> None:
        mark = id(optimizer)
        if mark in self._stepping:  # its last step was left by an exception
            del self._stepping[self._stepping.index(mark) :]
        self._stepping.append(mark)
        if len(self._stepping) > 1:
            return  # a wrapper steps the optimizer inside it
        self._optimizers.add(mark)
        if self._steps == 0:
            self._note("first_step_begins")
            self._write()

    def _step_ends(self, optimizer: object) -> None:
        mark = id(optimizer)
        if mark not in self._stepping:
            return
        del self._stepping[self._stepping.index(mark) :]
        if self._stepping:
            return
        self._steps += 1
        self._histories[mark] = _history_to_come(optimizer)
        if self._steps == 1:
            self._note("first_step_ends")
        if self._steps <= 2 or time.monotonic() - self._written >= _WRITE_S:  # noqa: PLR2004
            self._write()

    def _out_of_memory(self, device: int, requested: int, _total: int, free: int) -> None:
        """Note a request that failed; the allocator raises when this returns."""
        self._error_count += 1
        if self._stepping:
            where = "optimizer_step"
        elif self._bindings._current_graph_task_id() != -1:  # noqa: SLF001
            where = "backward"
        else:
            where = "elsewhere"
        now = self._read(device)
        if len(self._errors) < _MOST_ERRORS:
            self._errors.append(
                {
                    "device": device,
                    "requested_bytes": requested,
                    "free_bytes": free,
                    "allocated_bytes": now["allocated_bytes"],
                    "reserved_bytes": now["reserved_bytes"],
                    "where": where,
                    "optimizer_steps": self._steps,
                }
            )
        self._stepping.clear()
        self._write()

    def _at_exit(self) -> None:
        self._driver.listen(None)  # nothing can be asked of an interpreter that has ended
        self._ending = "exit"
        uncaught = getattr(sys, "last_type", None)
        if uncaught is not None:
            self._ending = "exception"
            name = f"{uncaught.__module__}.{uncaught.__qualname__}"
            self._exception = name.removeprefix("builtins.")
        self._write()

    def _at_os_exit(self, status: int) -> None:
        self._ending = "exit"
        self._exit_status = status
        self._write()

    # -- what is read ------------------------------------------------------------------------

    def _devices(self) -> list[int]:
        """The devices on which this process ever allocated."""
        if not self._cuda:
            return []
        every = range(self._bindings._cuda_getDeviceCount())  # noqa: SLF001
        if not self._driver.virtual:
            return list(every)
        return [device for device in every if self._driver.used(device)[1]]

    def _read(self, device: int) -> Peaks:
        """Read a device's counters; peaks reach back to before any reset by the program."""
        found: Peaks = dict.fromkeys(
            (
                "peak_allocated_bytes",
                "peak_reserved_bytes",
                "allocated_bytes",
                "reserved_bytes",
                "inactive_split_bytes",
                "alloc_retries",
            )
        )
        try:
            stats = self._bindings._cuda_memoryStats(device)  # noqa: SLF001
        except RuntimeError:
            stats = None  # an allocator of the program's own may keep no counters
        if stats is not None:
            found = {
                "peak_allocated_bytes": stats["allocated_bytes"]["all"]["peak"],
                "peak_reserved_bytes": stats["reserved_bytes"]["all"]["peak"],
                "allocated_bytes": stats["allocated_bytes"]["all"]["current"],
                "reserved_bytes": stats["reserved_bytes"]["all"]["current"],
                "inactive_split_bytes": stats["inactive_split_bytes"]["all"]["current"],
                "alloc_retries": stats["num_alloc_retries"],
            }
            before = self._folded.get(device, {})
            for name in ("peak_allocated_bytes", "peak_reserved_bytes"):
                found[name] = max(found[name], before.get(name, 0))
            found["alloc_retries"] += before.get("alloc_retries", 0)
        found["device_used_bytes"] = self._driver.used(device)[0] if self._driver.virtual else None
        return found

    def _fold_peaks(self) -> None:
        for device in self._devices():
            now, kept = self._read(device), self._folded.setdefault(device, {})
            for name in ("peak_allocated_bytes", "peak_reserved_bytes"):
                if now[name] is not None:
                    kept[name] = now[name]

    def _fold_counts(self) -> None:
        for device in self._devices():
            retries = self._read(device)["alloc_retries"]
            if retries is not None:
                self._folded.setdefault(device, {})["alloc_retries"] = retries

    def _note(self, until: str) -> None:
        for device in self._devices():
            self._moments.setdefault(device, []).append({"until": until, **self._read(device)})

    # -- what is told ------------------------------------------------------------------------

    def _write(self) -> None:
        """Write the report, once CUDA has started in this process."""
        if not self._cuda:
            return
        path = f"{self._folder}/{self._name}"
        with open(f"{path}.partial", "w", encoding="utf-8") as stream:  # noqa: PTH123
            json.dump(self._report(), stream)
        os.replace(f"{path}.partial", path)  # noqa: PTH105
        self._written = time.monotonic()

    def _report(self) -> dict[str, Any]:
        calls, names = self._driver.invented()
        rank, world_size = self._find_rank()
        return {
            "pid": self._pid,
            "program": [*getattr(sys, "argv", [])],
            "name": self._process_name(),
            "rank": rank,
            "world_size": world_size,
            "torch": str(self._torch.__version__),
            "virtual": self._driver.virtual,
            "devices": [self._device(device) for device in self._devices()],
            "optimizers": len(self._optimizers),
            "optimizer_steps": self._steps,
            "out_of_memory": self._errors,
            "out_of_memory_count": self._error_count,
            "invented_calls": calls,
            "invented": names,
            "unknown_reads": self._reads.totals[0],
            "changed_reads": self._reads.totals[1],
            "reads": self._reads.report(),
            "benchmark": self._driver.benchmark(),
            "rounding_bytes": self._driver.rounding(self._devices()),
            "history_bytes": sum(self._histories.values()),
            "ending": self._ending,
            "exit_status": self._exit_status,
            "exception": self._exception,
        }

    def _device(self, device: int) -> dict[str, Any]:
        now = self._read(device)
        noted = self._moments.get(device, [])
        return {"device": device, **now, "phases": [*noted, {"until": "end", **now}]}

    def _find_rank(self) -> tuple[int | None, int | None]:
        """Return rank and world size: the launcher's, else those of a process group once seen."""
        told = (os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", ""))
        if told[0].isdigit() and told[1].isdigit():
            return int(told[0]), int(told[1])
        distributed = sys.modules.get("torch.distributed")
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            self._group = (int(distributed.get_rank()), int(distributed.get_world_size()))
        return self._group

    def _process_name(self) -> str | None:
        """Return the name that multiprocessing gave this process, unless it is the main one."""
        module = sys.modules.get("multiprocessing.process")
        name = None if module is None else str(module.current_process().name)
        return None if name == "MainProcess" else name


def watch(torch: Any, folder: str) -> None:
    """Observe this process, in which torch was just imported."""
    if getattr(torch._C, "_cuda_getDeviceCount", None) is None:  # noqa: SLF001
        return  # built without CUDA
    built_for = os.environ.get("MEMFIT_RUN_TORCH", "")
    if built_for and built_for != str(torch.__version__):
        sys.stderr.write(
            f"memfit: process {os.getpid()} imports torch {torch.__version__}, and the virtual GPU "
            f"was built for memfit's own torch {built_for}: install memfit beside the former\n"
        )
    _Watch(torch, folder).install()
