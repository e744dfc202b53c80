"""The items of the table: each a function that trains something, or uses what training uses."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

Run = Callable[[], str | None]
"""Runs an item in a process of its own, and may return a note for the table."""

QUICK_S, SLOW_S = 300, 900


class Absent(Exception):
    """This build of torch does not have what the item needs."""


class Refused(Exception):
    """The virtual card refused, in words that say what it does not offer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One line of the table."""

    area: str
    name: str
    what: str
    """What ran, in a few words."""
    run: Run
    key: str
    """The name by which `--only` and a child process find it."""
    card: str = "h100-80gb"
    devices: int = 1
    ranks: int = 1
    """Above 1 the item runs under torchrun."""
    env: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = QUICK_S
    needs: tuple[str, ...] = ()
    """Packages beside torch."""
    why: str = ""
    """Why it is known not to work, where it does not."""


_items: dict[str, Item] = {}


def add(item: Item) -> None:
    """Put an item into the table."""
    assert item.key not in _items, item.key
    _items[item.key] = item


def item(
    area: str,
    name: str,
    *,
    devices: int = 1,
    ranks: int = 1,
    env: Mapping[str, str] | None = None,
    timeout_s: float = QUICK_S,
    needs: tuple[str, ...] = (),
    why: str = "",
) -> Callable[[Run], Run]:
    """Make a function an item; its docstring says what runs."""

    def register(run: Run) -> Run:
        what = (run.__doc__ or "").strip().rstrip(".")
        key = getattr(run, "__name__", name)
        add(
            Item(
                area=area,
                name=name,
                what=what,
                run=run,
                key=key,
                devices=devices,
                ranks=ranks,
                env=env or {},
                timeout_s=timeout_s,
                needs=needs,
                why=why,
            )
        )
        return run

    return register


def items() -> dict[str, Item]:
    """Return every item, in the order of the table."""
    package = importlib.import_module("tests.compatibility.items")
    for module in sorted(found.name for found in pkgutil.iter_modules(package.__path__)):
        importlib.import_module(f"{package.__name__}.{module}")
    return _items
