"""Notes what runs while the allocator keeps its history; used in a worker process only.

Nothing here allocates device memory or keeps any alive: module hooks, hooks on the nodes of the
graph, and a trace of the user's own lines. Whether that held is checked: the ledger's peaks must
be those that were measured.
"""

from __future__ import annotations

import bisect
import gc
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, Self

from memfit.records import Category, Ledger, PhaseMemory
from memfit.trial.lazy import compiles, memory_snapshot
from memfit.trial.ledger import Notes, Phase, Place, Sources, Where, ledger
from memfit.trial.ledger_replay import Rules, replay

if TYPE_CHECKING:
    from memfit.devices.memory import MemoryReader
    from memfit.workload import Workload

Line = tuple[CodeType, int]
"""A line that runs: its function's code and its number."""
_UNNAMED = "CppFunction"
"""Class of the nodes that have none of their own in Python."""


class LedgerRecorder:
    """Records one trial on a CUDA device, from before its first allocation."""

    def __init__(self, reader: MemoryReader) -> None:
        """Prepare; `start` begins."""
        import torch  # noqa: PLC0415

        self._device = reader.device.index or 0
        self._torch = torch
        self._stats: Callable[[int], Any] = torch._C._cuda_memoryStats  # noqa: SLF001
        self._sequence: Callable[[], int] = torch._C._autograd._get_sequence_nr  # noqa: SLF001
        self._sources = Sources(
            torch=str(Path(torch.__file__).parent),
            memfit=str(Path(__file__).parents[1]),
            installed=sorted(
                {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib")}
            ),
            project=Path.cwd(),
        )
        self._notes = Notes()
        self._phase: tuple[str, str] | None = ("build", "none")
        self._since = 0
        self._model: Any = None
        self._names: dict[int, str] = {}
        self._parameters: dict[int, str] = {}
        self._modules: list[str] = []
        self._in_backward = False
        self._depth = 0
        self._recomputed = 0
        self._node = Where()
        self._lines: list[tuple[int, Line | None]] = []
        self._forward_modules: list[tuple[int, str]] = []
        self._last_line: Line | None = None
        self._handles: list[Any] = []
        self._in_module: dict[str, Where] = {}
        self._places: dict[tuple[str, int, str], Place] = {}

    @classmethod
    def start(cls, reader: MemoryReader) -> Self | None:
        """Start recording; None where the allocator keeps no history, or has begun already."""
        if reader.device.type != "cuda":
            return None
        import torch  # noqa: PLC0415

        recorder = cls(reader)
        if recorder._now():
            return None
        torch.cuda.memory._record_memory_history(  # noqa: SLF001
            "all", context="alloc", stacks="python", max_entries=sys.maxsize
        )
        return recorder

    def _now(self) -> int:
        """Events so far: allocations and frees."""
        counts = self._stats(self._device)["allocation"]["all"]
        return int(counts["allocated"]) + int(counts["freed"])

    # -- what the trial tells ----------------------------------------------------------------

    def optimizer(self, workload: Workload) -> Callable[[Any], Any]:
        """Return the workload's `optimizer` that also notes where it makes one."""

        def make(model: Any) -> Any:
            made = self._traced(workload.optimizer, model)
            if self._last_line is not None:
                self._notes.optimizer = self._place(self._last_line)
            return made

        return make

    def built(self, model: Any) -> None:
        """Note what the model holds, and hook its modules."""
        from torch.nn.modules import module as hooks  # noqa: PLC0415
        from torch.nn.parallel import DistributedDataParallel  # noqa: PLC0415

        wrapped = isinstance(model, DistributedDataParallel)
        self._model = model.module if wrapped else model
        self._names = {id(m): name for name, m in self._model.named_modules()}
        self._label_model()
        self._begin(None)
        if compiles():
            return  # hooks would break up the compiled graph, which then needs other memory
        self._handles = [
            hooks.register_module_forward_pre_hook(self._enter),
            hooks.register_module_forward_hook(self._leave, always_call=True),
        ]

    def loss(self, loss: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        """Return a loss that also notes its inputs and where its graph comes from."""

        def noted(model: Any, batch: Any) -> Any:
            self._label(_tensors(batch), "inputs", "")
            value = self._traced(loss, model, batch)
            node = getattr(value, "grad_fn", None)
            if node is not None:
                self._hook_graph(node)
            return value

        return noted

    def phase(self, name: str, groups: str, optimizer: Any) -> None:
        """Note that a phase begins, or with `group_done` that none does."""
        self._in_backward = name == "backward"
        self._node = Where()
        if name == "group_done":
            self._begin(None)
            self._notes.group_ends.append(self._now())
            self._label_model()
            self._label_state(optimizer)
            return
        self._begin((name, groups))
        if name == "backward":
            self._notes.backwards.append(self._now())
        if name == "optimizer_step":
            for parameter in self._model.parameters():
                if parameter.grad is not None:
                    module = self._parameters.get(id(parameter), "")
                    self._label([parameter.grad], "gradients", module)

    def _begin(self, phase: tuple[str, str] | None) -> None:
        """End the stretch that runs; what lies between two phases belongs to the later one."""
        now = self._now()
        if self._phase is not None:
            name, groups = self._phase
            self._notes.phases.append(Phase(name, groups, self._since, now))
            self._since = now
        self._phase = phase
        self._mark(Where())

    def finish(self, measured: tuple[PhaseMemory, ...]) -> Ledger | None:
        """Stop, and put the ledger together; None unless its peaks are those that were measured.

        Args:
            measured: The phases of this trial, as the allocator's counters have them.
        """
        memory = self._torch.cuda.memory
        for handle in self._handles:
            handle.remove()
        self._notes.ended = self._now()
        self._torch._C._cuda_clearCublasWorkspaces()  # noqa: SLF001 - their frees tell which they are
        events = self._now()
        gc.disable()  # what follows makes many objects and no cycles
        snapshot = memory_snapshot()
        memory._record_memory_history(None)  # noqa: SLF001
        history = replay(
            snapshot["device_traces"][self._device], Rules.of(snapshot["allocator_settings"])
        )
        if len(history.levels) - 1 != events:
            return None
        expected = {(p.phase, p.groups): p.peak_allocated_bytes for p in measured}
        found: dict[tuple[str, str], int] = {}
        for phase in self._notes.phases:
            key = (phase.name, phase.groups)
            found[key] = max(found.get(key, 0), history.highest(phase.begin, phase.end)[0])
        if found != expected:
            return None
        return ledger(history, self._notes, self._sources)

    # -- what holds memory -------------------------------------------------------------------

    def _label(self, tensors: Any, category: Category, module: str) -> None:
        now = self._now()
        for tensor in tensors:
            address = _address(tensor)
            if address:
                self._notes.labels.append((now, address, category, module))

    def _label_model(self) -> None:
        self._parameters = {
            id(p): name.rpartition(".")[0] for name, p in self._model.named_parameters()
        }
        for name, parameter in self._model.named_parameters():
            self._label([parameter], "parameters", name.rpartition(".")[0])
        for name, buffer in self._model.named_buffers():
            self._label([buffer], "buffers", name.rpartition(".")[0])

    def _label_state(self, optimizer: Any) -> None:
        state = getattr(optimizer, "state", None)
        if isinstance(state, Mapping):
            for key, entry in state.items():
                module = self._parameters.get(id(key), "")
                self._label(_tensors(entry), "optimizer state", module)

    # -- what runs ---------------------------------------------------------------------------

    def _mark(self, where: Where) -> None:
        notes = self._notes.where
        if not notes or notes[-1][1] != where:
            notes.append((self._now(), where))

    def _enter(self, module: Any, _args: Any) -> None:
        path = self._names.get(id(module), self._modules[-1] if self._modules else "")
        self._modules.append(path)
        if self._in_backward:
            if not self._depth:
                self._recomputed += 1
            self._depth += 1
        self._at_module()

    def _leave(self, _module: Any, _args: Any, _output: Any) -> None:
        if self._modules:
            self._modules.pop()
        if self._in_backward and self._depth:
            self._depth -= 1
            if not self._depth:
                self._notes.recomputed_until[self._recomputed] = self._now()
        self._at_module()

    def _at_module(self) -> None:
        path = self._modules[-1] if self._modules else ""
        if not self._in_backward:
            self._forward_modules.append((self._sequence(), path))
            where = self._in_module.get(path)
            if where is None:
                where = self._in_module[path] = Where(module=path)
            self._mark(where)
        elif self._depth:
            self._mark(Where(module=path, recomputes=self._recomputed))
        else:
            self._mark(self._node)

    def _hook_graph(self, root: Any) -> None:
        """Have every node of a graph tell when its backward runs, and whose forward made it."""
        line_starts = [sequence for sequence, _ in self._lines]
        module_starts = [sequence for sequence, _ in self._forward_modules]
        waiting, seen = [root], {root}
        while waiting:
            node = waiting.pop()
            name = type(node).__name__  # what `name()` tells too, and takes long for
            if name == _UNNAMED:
                name = node.name().rpartition("::")[2]
            if name == "AccumulateGrad":
                where = Where(module=self._parameters.get(id(node.variable), ""), node=name)
            else:
                sequence = node._sequence_nr()  # noqa: SLF001
                at = bisect.bisect_right(line_starts, sequence) - 1
                line = self._lines[at][1] if at >= 0 else None
                at = bisect.bisect_right(module_starts, sequence) - 1
                where = Where(
                    module=self._forward_modules[at][1] if at >= 0 else "",
                    place=self._place(line) if line else None,
                    node=name,
                )
            node.register_prehook(self._telling(where))
            for following, _ in node.next_functions:
                if following is not None and following not in seen:
                    seen.add(following)
                    waiting.append(following)
        self._lines.clear()
        self._forward_modules.clear()

    def _telling(self, where: Where) -> Callable[[Any], None]:
        notes, now = self._notes.where, self._now

        def hook(_gradients: Any) -> None:
            self._node = where
            if notes[-1][1] != where:
                notes.append((now(), where))

        return hook

    # -- the user's lines --------------------------------------------------------------------

    def _traced(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function of the user's, noting which of their lines makes which nodes."""
        self._last_line = None
        before = sys.gettrace()
        sys.settrace(self._tracer())
        try:
            return function(*args)
        finally:
            sys.settrace(before)

    def _tracer(self) -> Callable[[FrameType, str, Any], Any]:
        """Make what Python calls for every function that is called, the user's or not.

        Everything it needs is in its reach: it runs thousands of times in a microbatch.
        """
        lines, sequence, owner = self._lines, self._sequence, self._sources.owner
        users: dict[str, bool] = {}
        callers: list[Line | None] = []
        """The user's line that called each of the user's functions that run."""
        current: Line | None = None

        def note(line: Line | None) -> None:
            nonlocal current
            current = line
            number = sequence()
            if lines and lines[-1][0] == number:
                lines[-1] = (number, line)
            else:
                lines.append((number, line))

        def on_event(frame: FrameType, event: str, _argument: Any) -> Any:
            if event == "line":
                self._last_line = (frame.f_code, frame.f_lineno)
                note(self._last_line)
            elif event == "return":
                note(callers.pop() if callers else None)
            return on_event

        def on_call(frame: FrameType, _event: str, _argument: Any) -> Any:
            file = frame.f_code.co_filename
            users_own = users.get(file)
            if users_own is None:
                users_own = users[file] = owner(file) == 0
            if not users_own:
                return None
            callers.append(current)
            return on_event

        return on_call

    def _place(self, line: Line) -> Place:
        code, number = line
        key = (code.co_filename, number, code.co_name)
        place = self._places.get(key)
        if place is None:
            place = self._places[key] = self._sources.place(*key)
        return place


def _tensors(value: Any) -> Iterator[Any]:
    """Tensors in a nest of containers and of objects that hold them."""
    if hasattr(value, "untyped_storage"):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple | set):
        for item in value:
            yield from _tensors(item)
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        for item in vars(value).values():
            if hasattr(item, "untyped_storage"):
                yield item


def _address(tensor: Any) -> int | None:
    """Address of a tensor's memory on the device, or None where it has none of its own."""
    if tensor.device.type != "cuda":
        return None
    try:
        return int(tensor.untyped_storage().data_ptr())
    except RuntimeError:  # a subclass that only wraps others
        return None
