"""Trainers as people use them, over tokens that are unevenly spread; needs the extra `verify`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from memfit.verify.run import VerifyRequest, run_verify
from tests.verify.trainers.cases import CASES

if TYPE_CHECKING:
    from tests.verify.trainers.cases import Case


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.package}-{case.word}")
def test_what_a_trainer_makes_of_uneven_tokens(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(case.package)
    monkeypatch.setenv("PYTHONPATH", str(case.path.parents[3]), prepend=":")
    request = VerifyRequest(target=str(case.path), script=True, arguments=[case.word])
    made = run_verify(request, lambda _: None)

    assert tuple(f.code for f in made.findings) == case.codes
    assert made.loop is not None
    errors = [g.error or 0.0 for g in made.loop.groups]
    if case.codes == ("MF201",):
        assert max(errors) > 1
    elif case.codes == ("MF209",):
        assert 0.01 < max(errors) < 0.1
    else:
        assert max(errors) < 1e-6
