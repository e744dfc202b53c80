"""torch's compiler and its meta kernels, imported when something needs them and not before.

Training without `torch.compile` asks `torch._dynamo` only to keep out of the way (`disable`,
`graph_break`), but imports all of it for that, which takes about as long as importing torch. Until
more is asked of it, a stand-in answers: with no compiler loaded nothing is being compiled, so there
is nothing to keep out of. Device memory does not differ. Host memory does, so trials on the CPU
device do without the stand-in.

Where a trial asks for more, it ends with `NEEDS_COMPILER`; the nursery imports the compiler once
and the trial is started again. So it is with the part that writes code for GPUs (`NEEDS_BACKEND`),
which takes as long again, and with torch's kernels in Python for the meta device (`NEEDS_KERNELS`),
a quarter of the import of torch. Those are needed by torch's fake tensors, which say so when they
begin; by whoever imports one of their modules; and by what computes on the meta device, which gets
an error where a kernel is missing. So a trial that failed without them is started again with them.
"""

from __future__ import annotations

import functools
import importlib
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, NoReturn

from memfit.trial.chain import links

NEEDS_COMPILER = 75
"""Exit status of a trial that has to be started again, with the compiler imported."""
NEEDS_BACKEND = 76
"""The same, with the compiler's backend imported."""
NEEDS_KERNELS = 77
"""The same, with the kernels for the meta device imported."""
_KERNELS = "torch._meta_registrations"
_WITH_KERNELS = ("torch._decomp", "torch._prims", "torch._refs", "torch.utils._content_store")
"""Packages that nothing but the kernels imports with torch; they import each other in a circle, so
that only the kernels' own order works."""
_NO_KERNEL = "builtins.NotImplementedError"
"""What torch raises where a device has no kernel for an operator."""
_WITHOUT_CAUSE = {
    "torch.OutOfMemoryError",
    "builtins.MemoryError",
    "memfit.trial.checks.CheckFailed",
}
"""Failures that no kernel for the meta device would have prevented."""
_NAME = "torch._dynamo"
_CONFIG = f"{_NAME}.config"
_INDUCTOR = "torch._inductor"
_BACKEND = f"{_INDUCTOR}.compile_fx"


def import_torch() -> None:
    """Import torch without its kernels for the meta device, until they are needed."""
    global _missing_kernels  # noqa: PLW0603 - of the process, as what is imported is
    if "torch" in sys.modules:
        return
    sys.modules[_KERNELS] = ModuleType(_KERNELS)
    try:
        import torch  # noqa: PLC0415
    finally:
        del sys.modules[_KERNELS]
    _missing_kernels = _MissingKernels(torch)


def lacks_kernels() -> bool:
    """Whether the kernels for the meta device are missing."""
    return _missing_kernels is not None


def kernel_was_missing(error: BaseException) -> bool:
    """Whether something failed because a kernel for the meta device is missing."""
    return lacks_kernels() and bool(_kinds(error) & {_NO_KERNEL})


def import_kernels() -> None:
    """Import the kernels for the meta device now, where they are missing."""
    if _missing_kernels is not None:
        _missing_kernels.provide()


def end_where_kernels_were_missing(error: BaseException) -> None:
    """In the process of a trial: end it where missing kernels may be why it failed."""
    if _missing_kernels is not None and not _kinds(error) & _WITHOUT_CAUSE:
        _missing_kernels.provide()


def _kinds(error: BaseException) -> set[str]:
    """Return the classes of everything behind a failure."""
    return {kind for link in links(error) for kind in (link.kind, *link.bases)}


def install() -> None:
    """Put the stand-in in the compiler's place, if that is not imported yet."""
    import torch  # noqa: PLC0415

    if _NAME in sys.modules:
        return
    stand_in = _StandIn(Path(torch.__file__).parent / "_dynamo")
    sys.modules[_NAME] = stand_in
    torch._dynamo = stand_in  # noqa: SLF001
    sys.meta_path.insert(0, stand_in.finder)


def import_missing(exit_code: int) -> None:
    """Import what a trial lacked, where that is why it ended."""
    if exit_code == NEEDS_KERNELS:
        import_kernels()
    elif exit_code == NEEDS_COMPILER:
        import_kernels()
        import_compiler()
    elif exit_code == NEEDS_BACKEND:
        importlib.import_module(_BACKEND)


def import_compiler() -> None:
    """Import the compiler now, where only the stand-in is there."""
    found = sys.modules.get(_NAME)
    if isinstance(found, _StandIn):
        found.replace()


def end_instead_of_importing() -> None:
    """In the process of a trial: end it where something would have to be imported."""
    found = sys.modules.get(_NAME)
    if isinstance(found, _StandIn):
        found.trial = os.getpid()
    if _missing_kernels is not None:
        _missing_kernels.trial = os.getpid()
    if _BACKEND not in sys.modules:
        sys.meta_path.insert(0, _BackendFinder())


def compiles() -> bool:
    """Whether something has asked for compiled code for a GPU."""
    return _BACKEND in sys.modules


def memory_snapshot() -> Any:
    """Return torch's snapshot of its allocator and the history that it kept.

    To name lines of compiled code, torch would import all of its compiler for that. Where it is not
    imported, there is no such code.
    """
    import torch  # noqa: PLC0415

    if _INDUCTOR in sys.modules:
        return torch.cuda.memory._snapshot()  # noqa: SLF001
    torch._inductor = ModuleType(_INDUCTOR)  # noqa: SLF001 - has nothing that would be asked
    try:
        return torch.cuda.memory._snapshot()  # noqa: SLF001
    finally:
        del torch._inductor  # noqa: SLF001


class _StandIn(ModuleType):
    """Answers for `torch._dynamo` as long as nothing is compiled."""

    def __init__(self, folder: Path) -> None:
        super().__init__(_NAME)
        self.__path__: list[str] = []
        self.folder = folder
        self.finder = _Finder(self)
        self.real: ModuleType | None = None
        self.trial: int | None = None
        """Process that ends instead of importing the compiler."""

    def graph_break(self, msg: str = "") -> None:
        """Do nothing: nothing is compiled."""

    def disable(self, fn: Any = None, *rest: Any, **options: Any) -> Any:
        """Keep the compiler out of a function, once there is one."""
        if not isinstance(fn, FunctionType):
            return self.replace().disable(fn, *rest, **options)
        kept_out: Callable[..., Any] | None = None

        @functools.wraps(fn)
        def call(*args: Any, **keywords: Any) -> Any:
            nonlocal kept_out
            if self.real is None:
                return fn(*args, **keywords)
            if kept_out is None:
                kept_out = self.real.disable(fn, *rest, **options)
            return kept_out(*args, **keywords)

        return call

    def __getattr__(self, name: str) -> Any:
        """Answer from the compiler itself, but for its settings, which import nothing else."""
        _refuse_special(name)
        if name == "config" and self.real is None:
            return self._import_config()
        return getattr(self.replace(), name)

    def replace(self) -> ModuleType:
        """Import the compiler in the place of this module."""
        if self.real is None and sys.modules.get(_NAME) is self:
            if self.trial == os.getpid():
                _end(NEEDS_COMPILER)
            del sys.modules[_NAME]
            if self.finder in sys.meta_path:
                sys.meta_path.remove(self.finder)
            self.real = importlib.import_module(_NAME)
        return self.real or sys.modules[_NAME]

    def _import_config(self) -> ModuleType:
        if _CONFIG not in sys.modules:
            spec = importlib.util.spec_from_file_location(_CONFIG, self.folder / "config.py")
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[_CONFIG] = module
            spec.loader.exec_module(module)
        return sys.modules[_CONFIG]


class _Finder:
    """Imports the compiler as a whole where one of its modules is asked for."""

    def __init__(self, stand_in: _StandIn) -> None:
        self._stand_in = stand_in

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find a module of the compiler, which may have been imported by then."""
        del path  # the stand-in has none
        if not name.startswith(f"{_NAME}."):
            return None
        package = self._stand_in.replace()
        there = _there(name)
        return there or importlib.machinery.PathFinder.find_spec(name, package.__path__, target)


class _MissingKernels:
    """Stands for the kernels for the meta device while they are not imported."""

    def __init__(self, torch: Any) -> None:
        from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: PLC0415

        self._mode = FakeTensorMode
        self._begin = begin = FakeTensorMode.__init__
        self.trial: int | None = None
        """Process that ends instead of importing them."""

        @functools.wraps(begin)
        def begin_with_kernels(mode: Any, *args: Any, **options: Any) -> None:
            # Where fake tensors find no kernel, they run the real one, which takes memory.
            self.provide()
            begin(mode, *args, **options)

        FakeTensorMode.__init__ = begin_with_kernels  # type: ignore[method-assign,assignment]
        for name in (_KERNELS, *_WITH_KERNELS):
            parent, _, child = name.rpartition(".")
            if parent == torch.__name__:
                setattr(torch, child, _Awaited(name, self))
        sys.meta_path.insert(0, self)

    def provide(self) -> None:
        """Import the kernels."""
        global _missing_kernels  # noqa: PLW0603 - as above
        if self.trial == os.getpid():
            _end(NEEDS_KERNELS)
        if _missing_kernels is self:
            _missing_kernels = None
            self._mode.__init__ = self._begin  # type: ignore[method-assign]
            sys.meta_path.remove(self)
            importlib.import_module(_KERNELS)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Import the kernels where one of their modules is asked for."""
        del path, target
        if not any(f"{name}.".startswith(f"{family}.") for family in (_KERNELS, *_WITH_KERNELS)):
            return None
        self.provide()
        return _there(name)


class _Awaited(ModuleType):
    """Stands for a module of the kernels where it is reached as an attribute of torch."""

    def __init__(self, name: str, kernels: _MissingKernels) -> None:
        super().__init__(name)
        self._kernels = kernels

    def __getattr__(self, name: str) -> Any:
        """Answer from the module itself."""
        _refuse_special(name)
        self._kernels.provide()
        return getattr(sys.modules[self.__name__], name)


_missing_kernels: _MissingKernels | None = None


class _BackendFinder:
    """Ends the trial where it would import the compiler's backend for itself alone."""

    def __init__(self) -> None:
        self._trial = os.getpid()

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> None:
        """Find nothing; the trial's own children go on by themselves."""
        del path, target
        if name == _BACKEND and os.getpid() == self._trial:
            _end(NEEDS_BACKEND)


def _end(exit_code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def _refuse_special(name: str) -> None:
    """Have no name of Python's own, which everybody asks for who looks at all modules."""
    if name.startswith("__"):
        raise AttributeError(name)


def _there(name: str) -> importlib.machinery.ModuleSpec | None:
    """Find a module that has been imported while it was looked for."""
    # As long as it is in `sys.modules`, the import system would load it again by its own spec.
    module = sys.modules.pop(name, None)
    if module is None:
        return None
    return importlib.machinery.ModuleSpec(name, _Imported(module))  # type: ignore[arg-type]


class _Imported:
    """Loads a module that is imported already."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        """Leave it to the import system, which this loader overrules."""

    def exec_module(self, module: ModuleType) -> None:
        """Put the module that is there in the place of the new one."""
        sys.modules[module.__name__] = self._module
