"""The contract with user code, and loading it.

A workload is a class with a model, a batch and a loss, or a plain module with functions of those
names. The class's annotated fields are its parameters. Importing this module imports no torch.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import sys
import traceback
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from memfit.errors import UsageError, WorkloadError
from memfit.records import Parameter, WorkloadInfo
from memfit.sources import digest_of

if TYPE_CHECKING:
    import torch

_FUNCTIONS = ("model", "batch", "loss")
_PACKAGE = str(Path(__file__).parent)
_WHOLE = "memfit verify --full-size leaves verify_with out"


class Workload:
    """What is trained: subclass it, or write its methods as functions of a module.

    Every annotated field of the subclass is a parameter: `--set name=value` changes it.
    """

    verify_with: ClassVar[Mapping[str, Parameter]] = {}
    """Parameters of a smaller copy, which `memfit verify` takes unless told otherwise: what
    accumulation does to gradients shows in a few narrow layers as well."""

    _device: ClassVar[torch.device | None] = None

    def __init__(self, **parameters: Any) -> None:
        """Set parameters by name, as a training script does; the others keep their defaults."""
        for name, value in parameters.items():
            if not hasattr(type(self), name) and name not in _annotations(type(self)):
                raise TypeError(f"{type(self).__name__} has no parameter {name!r}")
            setattr(self, name, value)

    @property
    def device(self) -> torch.device:
        """The trial's device, for batches that are made where they are used."""
        import torch  # noqa: PLC0415

        return self._device or torch.device("cpu")

    @device.setter
    def device(self, device: torch.device | str) -> None:
        import torch  # noqa: PLC0415

        self.__dict__["_device"] = torch.device(device)

    def model(self) -> torch.nn.Module:
        """Build the model; called with the trial's device as the default device."""
        raise NotImplementedError

    def batch(self, m: int) -> Any:
        """Make a microbatch of `m` examples, the longest that training will see.

        Tensors, or a nest of dicts, sequences and dataclasses of tensors, with `m` as their first
        dimension. They are moved to the trial's device before forward.
        """
        raise NotImplementedError

    def loss(self, model: Any, batch: Any) -> torch.Tensor:
        """Return the mean loss over the batch's elements, a scalar with a graph."""
        raise NotImplementedError

    def optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        """Build the optimizer; AdamW over the parameters that need gradients by default."""
        import torch  # noqa: PLC0415

        return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])

    def count(self, batch: Any) -> int:
        """Count the elements that the loss is a mean over: tokens, for a language model.

        Not overridden, it is the number of examples, and this method is never called.
        """
        raise NotImplementedError

    def parallelize(self, model: torch.nn.Module, mesh: Any) -> torch.nn.Module:
        """Wrap the model for `D > 1` replicas; DistributedDataParallel by default.

        Args:
            model: The model on its device.
            mesh: A one-dimensional `torch.distributed.DeviceMesh` over the replicas.
        """
        from torch.nn.parallel import DistributedDataParallel  # noqa: PLC0415

        ids = [self.device.index] if self.device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=ids, process_group=mesh.get_group())

    def evaluate(self, model: Any, batch: Any) -> Any:
        """Run one evaluation pass; by default the loss, without gradients.

        Called with the model in evaluation mode, where `--evaluate` asks for it.
        """
        import torch  # noqa: PLC0415

        with torch.no_grad():
            return self.loss(model, batch)

    def counts_elements(self) -> bool:
        """Whether `count` was overridden."""
        return type(self).count is not Workload.count


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedWorkload:
    """A workload class with its parameters resolved, ready to be made in each trial."""

    make: Callable[[], Workload]
    info: WorkloadInfo


def split_target(target: str) -> tuple[str, str | None]:
    """Split `file.py:Name` or `package.module:Name` at its last colon.

    Raises:
        UsageError: When the target is empty, or is no module name and no existing Python file.
    """
    location, colon, name = target.rpartition(":")
    if not colon or "/" in name or "\\" in name:
        location, name = target, ""
    if location.endswith(".py") or "/" in location or (location and Path(location).exists()):
        _check_file(Path(location))
    elif not location or location.startswith("."):
        raise UsageError(
            f"{target!r} names no file or module", hint="write file.py or file.py:Name"
        )
    return location, name or None


def _check_file(path: Path) -> None:
    if path.is_dir():
        raise UsageError(f"{path} is a folder, not a Python file", hint="name the file in it")
    if not path.exists():
        folder = path.parent if path.parent.is_dir() else Path()
        near = difflib.get_close_matches(path.name, [p.name for p in folder.glob("*.py")], n=3)
        hint = f"did you mean {' or '.join(str(path.parent / n) for n in near)}?" if near else None
        raise UsageError(f"there is no file {path}", hint=hint or "check the path")
    if path.suffix != ".py":
        raise UsageError(
            f"{path} is not a Python file", hint="a workload is a .py file or a module"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedWorkload:
    """A workload class whose parameters are still open."""

    found: type[Workload]
    target: str
    path: Path | None
    """The user's file, or None for a module."""
    sha256: str | None

    def small(self) -> dict[str, Parameter]:
        """Return the parameters of the smaller copy that the workload says `verify` may take.

        Raises:
            WorkloadError: When it names what is no parameter, or a value that one does not take.
        """
        given: Any = self.found.verify_with
        if not isinstance(given, Mapping):
            raise WorkloadError(
                f"{self.found.__name__}.verify_with is a {type(given).__name__}",
                hint='write a dict of parameters, as in verify_with = {"layers": 2}',
            )
        with user_code(f"the annotations of {self.found.__name__} cannot be read"):
            known = _annotations(self.found)
        for name, value in given.items():
            sets = f"{self.found.__name__}.verify_with sets {name}={value}"
            if name not in known:
                raise WorkloadError(
                    f"{sets}, and there is no such parameter",
                    hint=f"it has {', '.join(sorted(known)) or 'none at all'}; {_WHOLE}",
                )
            try:
                msgspec.convert(value, known[name], strict=False)
            except msgspec.ValidationError:
                raise WorkloadError(
                    f"{sets}, and it takes {_type_words(known[name])}", hint=_WHOLE
                ) from None
        return dict(given)

    def with_parameters(self, parameters: Mapping[str, Parameter]) -> LoadedWorkload:
        """Resolve the parameters.

        Args:
            parameters: Values to set; text is converted to the type of the annotation.

        Raises:
            UsageError: When there is no such parameter, or it takes no such value.
        """
        found = self.found
        values = _resolve(found, parameters)

        def make() -> Workload:
            workload = found()
            for key, value in values.items():
                setattr(workload, key, value)
            return workload

        return LoadedWorkload(
            make=make,
            info=WorkloadInfo(
                name=found.__name__,
                description=inspect.cleandoc(found.__doc__ or "").strip().partition("\n\n")[0],
                target=self.target,
                path=str(self.path) if self.path else None,
                sha256=self.sha256,
                parameters={key: _storable(value) for key, value in values.items()},
            ),
        )


def import_workload(target: str) -> ImportedWorkload:
    """Import the user's code and find its workload.

    Args:
        target: `file.py`, `file.py:Name`, `package.module` or `package.module:Name`.

    Raises:
        UsageError: When there is no such file, no workload or several.
        WorkloadError: When the user's code fails while it is imported.
    """
    location, name = split_target(target)
    path = Path(location) if location.endswith(".py") else None
    module, _ = import_target(target)
    found = _find(module, name, target)
    return ImportedWorkload(found=found, target=target, path=path, sha256=digest_of(module))


def load(target: str, parameters: Mapping[str, Parameter]) -> LoadedWorkload:
    """Import the user's code, find its workload and resolve its parameters.

    Raises:
        UsageError: When there is no such file, no workload or several, or a bad parameter.
        WorkloadError: When the user's code fails while it is imported.
    """
    return import_workload(target).with_parameters(parameters)


def import_target(target: str) -> tuple[ModuleType, str | None]:
    """Import what a target names, and return the module and the name after its colon.

    Raises:
        UsageError: When there is no such file or module.
        WorkloadError: When the user's code fails while it is imported.
    """
    location, name = split_target(target)
    module = _import_file(Path(location)) if location.endswith(".py") else _import_module(location)
    return module, name


def _storable(value: Any) -> Parameter:
    return value if isinstance(value, bool | int | float | str | None) else str(value)


def _import_file(path: Path) -> ModuleType:
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    imported = sys.modules.get(path.stem)
    if imported is not None and getattr(imported, "__file__", None) == str(path.resolve()):
        return imported
    name = path.stem if imported is None else f"{path.stem}_workload"
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} cannot be imported", hint="a workload is a .py file or a module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # DataLoader workers pickle classes by module name
    try:
        with user_code(f"{path} failed while it was imported"):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]  # as Python does: half a module is none
        raise
    return module


def _import_module(name: str) -> ModuleType:
    sys.path.insert(0, str(Path.cwd()))
    with user_code(f"module {name} failed while it was imported"):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if not f"{name}.".startswith(f"{error.name}."):
                raise  # it is there, and imports another that is not
            raise UsageError(
                f"there is no file or module {name!r}", hint=_near_module(name)
            ) from None


def _near_module(name: str) -> str:
    near = difflib.get_close_matches(name, [p.name for p in Path().glob("*.py")], n=3)
    if near:
        return f"did you mean {' or '.join(near)}?"
    parent, _, last = name.rpartition(".")
    if parent and Path(*parent.split(".")).with_suffix(".py").is_file():
        return f"did you mean {parent}:{last}?"
    return "write a path that ends in .py, or a module"


class user_code:  # noqa: N801
    """Context in which every failure is the user's: it becomes a WorkloadError with their words."""

    def __init__(self, message: str) -> None:
        self._message = message

    def __enter__(self) -> None:
        """Enter the user's code."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Turn a failure into a WorkloadError."""
        if error is None or isinstance(error, UsageError | WorkloadError | KeyboardInterrupt):
            return
        raise WorkloadError(
            f"{self._message}: {type(error).__name__}: {error}", details=user_traceback(error)
        ) from error


def user_traceback(error: BaseException) -> str:
    """Format a traceback without memfit's own frames and without the import system's."""
    shown = traceback.TracebackException.from_exception(error, compact=True)
    link: traceback.TracebackException | None = shown
    while link is not None:
        kept = [f for f in link.stack if is_users(f.filename)]
        link.stack = traceback.StackSummary.from_list([_with_short_path(f) for f in kept])
        if isinstance(getattr(link, "filename", None), str):  # of a syntax error
            link.filename = short_path(link.filename)
        link = link.__cause__ or link.__context__
    return "".join(shown.format()).rstrip()


def _with_short_path(frame: traceback.FrameSummary) -> traceback.FrameSummary:
    """Return the frame with its file told by `short_path`."""
    return traceback.FrameSummary(
        short_path(frame.filename), frame.lineno, frame.name, line=frame.line
    )


def short_path(filename: str) -> str:
    """Tell a file by its path in the project or in the installed packages.

    Results are shared, and where somebody's home or environment lies is nobody's business.
    """
    _, installed, package = filename.rpartition("/site-packages/")
    if installed:
        return package
    try:
        return str(Path(filename).relative_to(Path.cwd()))
    except (ValueError, OSError):  # elsewhere, or the working folder is gone
        return filename


def is_users(filename: str) -> bool:
    """Whether a file is neither memfit's own nor the import system's."""
    return not filename.startswith((_PACKAGE, "<frozen importlib", importlib.__file__))


def _find(module: ModuleType, name: str | None, target: str) -> type[Workload]:
    classes = {
        key: value
        for key, value in vars(module).items()
        if isinstance(value, type)
        and issubclass(value, Workload)
        and value is not Workload
        and value.__module__ == module.__name__
    }
    if name is not None:
        found = getattr(module, name, None)
        if isinstance(found, type) and issubclass(found, Workload):
            return found
        near = difflib.get_close_matches(name, classes, n=3) or sorted(classes)
        raise UsageError(
            f"{target}: there is no workload {name!r}",
            hint=f"it has {', '.join(near)}" if near else _how_to_write(),
        )
    if len(classes) == 1:
        return next(iter(classes.values()))
    if classes:
        raise UsageError(
            f"{target} has {len(classes)} workloads: {', '.join(sorted(classes))}",
            hint=f"pick one: {target}:{min(classes)}",
        )
    present = [f for f in _FUNCTIONS if callable(getattr(module, f, None))]
    if len(present) == len(_FUNCTIONS):
        return _from_functions(module)
    missing = [f"{f}()" for f in _FUNCTIONS if f not in present]
    raise UsageError(
        f"{target} has no workload"
        + (f": it has no {' and no '.join(missing)}" if present else ""),
        hint=_how_to_write(),
    )


def _how_to_write() -> str:
    return "subclass memfit.Workload, or write functions model(), batch(m) and loss(model, batch)"


def _from_functions(module: ModuleType) -> type[Workload]:
    """Make a class of a plain module's functions."""
    names = (*_FUNCTIONS, "optimizer", "count", "parallelize", "evaluate")
    own = {n: staticmethod(getattr(module, n)) for n in names if callable(getattr(module, n, None))}
    name = module.__name__.rpartition(".")[2]
    said = {n: vars(module)[n] for n in ("verify_with",) if n in vars(module)}
    return type(
        name, (Workload,), {**own, **said, "__doc__": module.__doc__, "__module__": module.__name__}
    )


def _annotations(found: type[Workload]) -> dict[str, Any]:
    """Parameters of a workload class: its annotated fields and those of its bases."""
    return {
        key: hint
        for base in reversed(found.__mro__)
        if base is not Workload
        for key, hint in inspect.get_annotations(base, eval_str=True).items()
        if not key.startswith("_") and not _is_class_variable(hint)
    }


def _is_class_variable(hint: Any) -> bool:
    return hint is ClassVar or typing.get_origin(hint) is ClassVar


def _resolve(found: type[Workload], given: Mapping[str, Parameter]) -> dict[str, Any]:
    """Values of all parameters: the class's defaults, changed by what was given."""
    with user_code(f"the annotations of {found.__name__} cannot be read"):
        hints = _annotations(found)
    values: dict[str, Any] = {}
    for key, text in given.items():
        if key not in hints:
            near = difflib.get_close_matches(key, hints, n=3) or sorted(hints)
            raise UsageError(
                f"{found.__name__} has no parameter {key!r}",
                hint=f"it has {', '.join(near)}" if near else "it has no parameters at all",
            )
        if text == "None" and type(None) in typing.get_args(hints[key]):
            values[key] = None
            continue
        try:
            values[key] = msgspec.convert(text, hints[key], strict=False)
        except msgspec.ValidationError:
            default = getattr(found, key, None)
            raise UsageError(
                f"--set {key}={text}: {key} takes {_type_words(hints[key])}",
                hint=f"as in --set {key}={default}" if default is not None else None,
            ) from None
    for key in hints:
        if key not in values:
            if not hasattr(found, key):
                raise UsageError(
                    f"{found.__name__} needs a value for {key}", hint=f"add --set {key}=VALUE"
                )
            values[key] = getattr(found, key)
    return {key: values[key] for key in hints}


def _type_words(hint: Any) -> str:
    if typing.get_origin(hint) is typing.Literal:
        return " or ".join(str(value) for value in typing.get_args(hint))
    return hint.__name__ if isinstance(hint, type) else str(hint)
