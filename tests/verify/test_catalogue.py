"""The table of codes: nothing stands in it that no broken program brings about."""

from __future__ import annotations

import pytest

from memfit.verify.catalogue import CATALOGUE
from tests.verify import test_loops, test_replicas, test_workloads

SHOWN = {**test_workloads.BROKEN, **test_loops.BROKEN, **test_replicas.BROKEN}


@pytest.mark.parametrize("code", sorted(CATALOGUE))
def test_every_code_has_a_broken_program_that_is_found_under_it(code: str) -> None:
    assert code in SHOWN


def test_every_broken_program_is_found_under_a_code_of_the_catalogue() -> None:
    assert set(SHOWN) == set(CATALOGUE)
