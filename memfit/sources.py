"""Which code a workload is: a digest of its file, and of the user's own modules that it imports."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

_INSTALLED = ("site-packages", "dist-packages")


def digest_of(module: ModuleType) -> str | None:
    """Return the SHA-256 of a module that is imported, with those that it stands on.

    Of what it imports, the files count that lie in its own folder or the working folder, or below,
    and are no installed packages. What it imports later, inside a function, counts once it has.

    Returns:
        The digest, that of the file alone where it imports no such module; None without a file.
    """
    own = getattr(module, "__file__", None)
    if own is None or not Path(own).is_file():
        return None
    main = Path(own).resolve()
    folders = (main.parent, Path.cwd().resolve())
    texts = {main: (module.__name__, main.read_bytes())}
    waiting = [main]
    while waiting:
        name, text = texts[waiting.pop()]
        for imported in _imported(name, text):
            file = _file_of(sys.modules.get(imported), folders)
            if file is not None and file not in texts:
                texts[file] = (imported, file.read_bytes())
                waiting.append(file)
    digest = hashlib.sha256(texts.pop(main)[1])
    for name, text in sorted(texts.values()):
        digest.update(b"\0" + name.encode() + b"\0" + text)
    return digest.hexdigest()


def _file_of(module: ModuleType | None, folders: tuple[Path, ...]) -> Path | None:
    name = getattr(module, "__file__", None)
    if not isinstance(name, str) or not name.endswith(".py"):
        return None
    file = Path(name).resolve()
    mine = any(file.is_relative_to(folder) for folder in folders)
    installed = any(part in _INSTALLED for part in file.parts)
    memfits = file.is_relative_to(Path(__file__).parent)
    return file if mine and not installed and not memfits and file.is_file() else None


def _imported(name: str, text: bytes) -> Iterator[str]:
    """Yield the names of all modules that the text of a module may import."""
    package = getattr(sys.modules.get(name), "__package__", None)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _prefixes(alias.name)
        elif isinstance(node, ast.ImportFrom):
            relative = "." * node.level + (node.module or "")
            try:
                base = importlib.util.resolve_name(relative, package or None)
            except ImportError:
                continue
            yield from _prefixes(base)
            yield from (f"{base}.{alias.name}" for alias in node.names)


def _prefixes(name: str) -> Iterator[str]:
    parts = name.split(".")
    return (".".join(parts[:end]) for end in range(1, len(parts) + 1))
