"""An exception and everything behind it, as links that outlive their process. Pure: no torch.

What a message says counts only where the library that ran out of memory said it. The same words in
an exception that the user's own code raised are the user's words. So each link tells who raised
it: compiled code, or the Python package whose `raise` statement did.
"""

from __future__ import annotations

import dis
import re
import sys
from collections import deque
from types import TracebackType
from typing import Any

from memfit.trial.protocol import Link

MOST_LINKS = 40
_MOST_CHARACTERS = 20_000
_NOBODY = "nobody"
"""Where an exception was made and never raised, such as a member that a group was given."""

_TRACEBACK = "Traceback (most recent call last):"
_FRAME = re.compile(r'^  File "(?P<path>[^"]+)", line \d+')
_LAST = re.compile(r"^(?P<kind>[A-Za-z_][\w.]*)(?:: (?P<message>.*))?$", re.DOTALL)
_CARRIED = re.compile(
    r"^(?:backend='[^'\n]*' raised:\n)?(?P<kind>[A-Z]\w*(?:Error|Exception)): (?P<message>.*)",
    re.DOTALL,
)
"""How torch's compiler tells an exception that it passes on; `torch/_dynamo/exc.py`."""


def links(error: BaseException) -> list[Link]:
    """Tell an exception, its causes, its contexts and the members of groups, the outermost first.

    A traceback that is quoted in a message, as a DataLoader quotes that of its worker, becomes a
    link of its own behind the exception that quotes it.
    """
    found: list[Link] = []
    seen: set[int] = set()
    waiting: deque[BaseException] = deque([error])
    while waiting and len(found) < MOST_LINKS:
        link = waiting.popleft()
        if id(link) in seen:
            continue
        seen.add(id(link))
        behind = _behind(link)
        found += _told(link, alone=not behind)
        waiting.extend(behind)
    return found[:MOST_LINKS]


def _behind(error: BaseException) -> list[BaseException]:
    """Return what an exception carries: cause, context, members, and what a compiler wrapped."""
    carried: list[Any] = [error.__cause__, error.__context__]
    if isinstance(error, BaseExceptionGroup):
        carried += error.exceptions
    carried.append(getattr(error, "inner_exception", None))  # torch._dynamo.BackendCompilerFailed
    return [one for one in carried if isinstance(one, BaseException)]


def _told(error: BaseException, *, alone: bool) -> list[Link]:
    message = _message(error)
    own, quoted = _split(message)
    kind = _name(type(error))
    link = Link(
        kind=kind,
        message=own,
        bases=[_name(base) for base in type(error).__mro__[1:-1]],
        raised_by=_raised_by(error.__traceback__),
    )
    if quoted is None and alone and kind.startswith("torch."):
        quoted = _carried(own)
        if quoted is not None:
            link.message = ""
    return [link] if quoted is None else [link, quoted]


def _message(error: BaseException) -> str:
    try:
        return str(error)[-_MOST_CHARACTERS:]
    except Exception:  # noqa: BLE001 - the user's own __str__ may fail as well
        return ""


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _raised_by(traceback: TracebackType | None) -> str | None:
    """Return the package whose Python code raised an exception; None where compiled code did."""
    if traceback is None:
        return _NOBODY
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    code = traceback.tb_frame.f_code.co_code
    if code[traceback.tb_lasti] != dis.opmap["RAISE_VARARGS"]:
        return None
    module = str(traceback.tb_frame.f_globals.get("__name__", _NOBODY))
    return module.partition(".")[0]


# -- tracebacks in messages --------------------------------------------------------------------


def _split(message: str) -> tuple[str, Link | None]:
    """Part a message from the traceback that it quotes."""
    before, found, after = message.rpartition(_TRACEBACK)
    if not found:
        return message, None
    frames = [(m["path"], at) for at, m in enumerate(map(_FRAME.match, lines(after))) if m]
    if not frames:
        return message, None
    path, at = frames[-1]
    rest = lines(after)[at + 1 :]
    source = next((line.strip() for line in rest[:1] if line.startswith("    ")), "")
    end = next((i for i, line in enumerate(rest) if line and not line[0].isspace()), None)
    if end is None:
        return message, None
    last = _LAST.match("\n".join(rest[end:]).rstrip())
    if last is None:
        return message, None
    raised_by = _package_of(path) if source.startswith("raise") else None
    quoted = Link(kind=_qualified(last["kind"]), message=last["message"] or "", raised_by=raised_by)
    return before, quoted


def lines(text: str) -> list[str]:
    """Split a text into lines; unlike `splitlines`, at newlines alone."""
    return text.strip("\n").split("\n")


def _carried(message: str) -> Link | None:
    """Return the exception that torch's compiler tells in its own, where it is not kept itself."""
    found = _CARRIED.match(message)
    if found is None:
        return None
    return Link(kind=_qualified(found["kind"]), message=found["message"])


def _qualified(name: str) -> str:
    """Give the name of a class in a traceback its module, which is left out for built-in ones."""
    if "." in name:
        return name
    if name == "OutOfMemoryError":
        return "torch.OutOfMemoryError"
    return f"builtins.{name}" if name in _BUILTINS else f"__main__.{name}"


_BUILTINS = frozenset(
    name
    for name, value in vars(sys.modules["builtins"]).items()
    if isinstance(value, type) and issubclass(value, BaseException)
)


def _package_of(path: str) -> str:
    """Return the top package of a file of a traceback."""
    for place in ("/site-packages/", f"/python{sys.version_info[0]}.{sys.version_info[1]}/"):
        _, found, rest = path.rpartition(place)
        if found:
            return rest.partition("/")[0].removesuffix(".py")
    return path.rpartition("/")[2].removesuffix(".py")
