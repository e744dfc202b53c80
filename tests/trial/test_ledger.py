"""Whose a line is, and how it is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from memfit.trial.ledger import Sources

SOURCES = Sources(
    torch="/env/lib/python3.12/site-packages/torch",
    memfit="/env/lib/python3.12/site-packages/memfit",
    installed=("/usr/lib/python3.12",),
    project=Path("/home/me/project"),
)


def frame(filename: str, line: int = 7) -> dict[str, object]:
    return {"filename": filename, "line": line, "name": "forward"}


USERS = frame("/home/me/project/models/net.py")
ELSEWHERE = frame("/home/me/other/net.py")
LIBRARY = frame("/env/lib/python3.12/site-packages/timm/layers.py")
SYSTEM = frame("/usr/lib/python3/dist-packages/timm/layers.py")
TORCH = frame("/env/lib/python3.12/site-packages/torch/nn/functional.py")
MEMFIT = frame("/env/lib/python3.12/site-packages/memfit/group.py")
STANDARD = frame("/usr/lib/python3.12/contextlib.py")


@pytest.mark.parametrize(
    ("frames", "told", "owner"),
    [
        ([TORCH, LIBRARY, USERS, MEMFIT], "models/net.py:7", 0),
        ([TORCH, LIBRARY, MEMFIT], "timm/layers.py:7", 1),
        ([TORCH, SYSTEM], "timm/layers.py:7", 1),
        ([TORCH, STANDARD, MEMFIT], "torch/nn/functional.py:7", 2),
        ([TORCH, ELSEWHERE], "other/net.py:7", 0),
    ],
)
def test_a_place_is_the_users_else_a_packages_else_torchs(
    frames: list[dict[str, object]], told: str, owner: int
) -> None:
    place, whose = SOURCES.innermost(frames)

    assert place is not None
    assert (place.told, whose) == (told, owner)


@pytest.mark.parametrize("frames", [[], [MEMFIT], [STANDARD, MEMFIT], [frame("<string>")]])
def test_what_neither_is_has_no_place(frames: list[dict[str, object]]) -> None:
    assert SOURCES.innermost(frames) == (None, 3)
