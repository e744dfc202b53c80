"""A slice of the benchmark of random workloads: emitted sizes survive, and are the largest."""

from __future__ import annotations

import pytest

from tests.benchmarks.draws import draw
from tests.benchmarks.nurseries import shared
from tests.benchmarks.survival import GROUPS, examine

SLICE = (132, 114, 198, 33, 122, 92)
"""Questions of seed 0 that are quick, with settings of the allocator that differ."""


@pytest.fixture(scope="module")
def nurseries():
    with shared():
        yield


@pytest.mark.virtual
@pytest.mark.parametrize("index", SLICE)
@pytest.mark.usefixtures("nurseries")
def test_an_emitted_size_survives_and_no_larger_one_fits(index: int) -> None:
    finding = examine(draw(0, index))
    assert finding.faults == []
    assert finding.answer is not None
    assert finding.survival is not None
    assert finding.survival.groups_run >= GROUPS
