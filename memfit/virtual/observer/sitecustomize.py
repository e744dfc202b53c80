"""Loaded by every Python process of a run: waits for torch, and steps out of the way.

A process that never imports torch pays for one comparison per import. The program's own
`sitecustomize`, which this one hides, is loaded after it, and `sys.path` is left as it would be.
"""

from __future__ import annotations

import importlib.machinery
import os
import sys
from collections.abc import Sequence
from types import ModuleType

_HERE = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - pathlib costs time
_FOLDER = "MEMFIT_RUN_FOLDER"


def _load(spec: importlib.machinery.ModuleSpec) -> ModuleType:
    module = ModuleType(spec.name)
    module.__spec__ = spec
    module.__file__ = spec.origin
    module.__loader__ = spec.loader
    sys.modules[spec.name] = module
    if spec.loader is not None:
        spec.loader.exec_module(module)
    return module


def _watch(torch: ModuleType) -> None:
    """Observe this process; whatever goes wrong here is told and never ends the program."""
    try:
        import importlib.util  # noqa: PLC0415 - torch has imported it by now

        spec = importlib.util.spec_from_file_location("memfit_watch", f"{_HERE}/watch.py")
        assert spec is not None
        _load(spec).watch(torch, os.environ[_FOLDER])
    except Exception as error:  # noqa: BLE001
        sys.stderr.write(f"memfit: process {os.getpid()} is not observed: {error!r}\n")


class _AwaitTorch:
    """A finder that finds nothing, and sees torch go by."""

    def find_spec(
        self,
        name: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        """Let the other finders find torch, and note when it has been imported."""
        if name != "torch":
            return None
        for finder in list(sys.meta_path):
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec: importlib.machinery.ModuleSpec | None = find and find(name, path, target)
            if spec is not None:
                if spec.loader is not None:
                    self._follow(spec.loader)
                return spec
        return None

    def _follow(self, loader: object) -> None:
        execute = loader.exec_module  # type: ignore[attr-defined]

        def exec_module(module: ModuleType) -> None:
            execute(module)
            del loader.exec_module  # type: ignore[attr-defined]
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                _watch(module)

        loader.exec_module = exec_module  # type: ignore[attr-defined]


def _begin() -> None:
    sys.path[:] = [entry for entry in sys.path if entry != _HERE]
    if os.environ.get(_FOLDER):
        sys.meta_path.insert(0, _AwaitTorch())
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize")
    if spec is not None and spec.loader is not None:
        _load(spec)


_begin()
