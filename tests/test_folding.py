"""Numbered siblings are told as one, and what was folded can be unfolded."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.folding import fold, natural, unfold


@pytest.mark.parametrize(
    ("paths", "folded"),
    [
        (["layers.0.mlp", "layers.1.mlp", "layers.2.mlp"], ["layers.[0-2].mlp"]),
        (["layers.0", "layers.2"], ["layers.0", "layers.2"]),
        (["layers.9", "layers.10", "head"], ["head", "layers.[9-10]"]),
        (["0.a", "1.a", "0.b"], ["0.b", "[0-1].a"]),
        (["a1", "a2"], ["a1", "a2"]),
        (["layers.01", "layers.02"], ["layers.01", "layers.02"]),
        (["", ""], [""]),
    ],
)
def test_paths_that_count_up_are_one(paths: list[str], folded: list[str]) -> None:
    assert sorted(path for path, _ in fold(paths)) == sorted(folded)


@given(st.sets(st.from_regex(r"(ab|[0-9])(\.(c|[0-9]))?(\.[0-9])?", fullmatch=True)))
def test_unfolding_gives_every_path_once(paths: set[str]) -> None:
    folded = fold(paths)

    assert sorted(p for path, _ in folded for p in unfold(path)) == sorted(paths)
    assert all(unfold(path) == members for path, members in folded)


def test_numbers_sort_by_their_value() -> None:
    assert sorted(["b.10", "b.2", "a"], key=natural) == ["a", "b.2", "b.10"]
