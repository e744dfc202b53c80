"""Where in the user's own file something happens."""

from __future__ import annotations

import linecache
import sys
import sysconfig
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

from memfit.verification import Place

_MEMFIT = str(Path(__file__).parents[2])
_TORCH = str(Path(torch.__file__).parent)
_STANDARD = sysconfig.get_paths()["stdlib"]


def here() -> Place | None:
    """Return the innermost line of the user's file that is being run.

    Where no file of the user's is on the stack, it is the innermost line of an installed package
    other than torch.
    """
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - the one way to walk a stack fast
    package: Place | None = None
    while frame is not None:
        name = frame.f_code.co_filename
        if "/site-packages/" in name:
            if package is None and not name.startswith((_TORCH, _MEMFIT)):
                package = _place(name, frame.f_lineno)
        elif not name.startswith((_MEMFIT, "<", _STANDARD)):
            return _place(name, frame.f_lineno)
        frame = frame.f_back
    return package


def of_code(code: CodeType) -> Place | None:
    """Return where a function begins, when it is the user's."""
    if code.co_filename.startswith((_MEMFIT, _TORCH, "<")):
        return None
    return _place(code.co_filename, code.co_firstlineno)


def of_method(owner: Any, name: str) -> Place | None:
    """Return where a method begins, when it is the user's."""
    code = getattr(getattr(owner, name, None), "__code__", None)
    return None if code is None else of_code(code)


def _place(name: str, line: int) -> Place:
    return Place(file=_short(name), line=line, code=linecache.getline(name, line).strip())


def _short(name: str) -> str:
    """Tell a file by its path in the working folder or in the installed packages."""
    _, installed, package = name.rpartition("/site-packages/")
    if installed:
        return package
    try:
        return str(Path(name).relative_to(Path.cwd()))
    except (ValueError, OSError):
        return name
