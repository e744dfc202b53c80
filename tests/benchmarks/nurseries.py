"""Nurseries that serve many runners in turn, where hundreds of probes would each import torch.

A nursery's trials are forked from it before any CUDA call, so what one runner asked leaves nothing
behind for the next: each trial sets its own limit on the card, and is a process of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from memfit.trial import runner

_KEEP = 2
"""Nurseries that wait for another runner; each holds torch in host memory."""
_Key = tuple[tuple[str, str], ...]


class _Lent:
    """A nursery as a runner sees it: ended, it goes back to the shelf."""

    def __init__(self, shelf: _Shelf, key: _Key, nursery: Any) -> None:
        self._shelf = shelf
        self._key = key
        self._nursery = nursery
        self.channel = nursery.channel
        self.pid = nursery.pid

    def kill(self, *, ends_by_itself: bool = False) -> int:
        if ends_by_itself:  # it is gone already
            return int(self._nursery.kill(ends_by_itself=True))
        self._shelf.give_back(self._key, self._nursery)
        return 0

    def double(self) -> None:
        """Return None: a second one would keep the parameters of the probe that it was made in."""

    def output(self) -> str | None:
        said: str | None = self._nursery.output()
        return said


class _Shelf:
    """Nurseries that wait, the last used one at the end."""

    def __init__(self, make: Any) -> None:
        self._make = make
        self._waiting: list[tuple[_Key, Any]] = []

    def lend(self, environment: Mapping[str, str]) -> _Lent:
        # The size of the card is each trial's own; everything else has to be the same.
        card = ";".join(
            part
            for part in environment.get("MEMFIT_VGPU_CARD", "").split(";")
            if not part.startswith("total=")
        )
        key = tuple(sorted({**environment, "MEMFIT_VGPU_CARD": card}.items()))
        for position, (waiting, nursery) in enumerate(self._waiting):
            if waiting == key:
                del self._waiting[position]
                return _Lent(self, key, nursery)
        return _Lent(self, key, self._make(environment))

    def give_back(self, key: _Key, nursery: Any) -> None:
        self._waiting.append((key, nursery))
        while len(self._waiting) > _KEEP:
            self._waiting.pop(0)[1].kill()

    def close(self) -> None:
        while self._waiting:
            self._waiting.pop()[1].kill()


@contextmanager
def shared() -> Iterator[None]:
    """Let all runners of this process share nurseries while the context lasts."""
    make = runner.Nursery
    shelf = _Shelf(make)
    runner.Nursery = shelf.lend  # type: ignore[assignment, misc]
    try:
        yield
    finally:
        runner.Nursery = make  # type: ignore[misc]
        shelf.close()
