"""The examples: clean, or with exactly what is true of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from memfit.verification import Outcome
from memfit.workload import import_workload
from tests.verify.checking import check_target, outcome

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("name", ["gpt2.py", "llama.py", "resnet50.py"])
def test_a_large_example_says_what_is_enough_to_verify(name: str) -> None:
    imported = import_workload(str(EXAMPLES / name))
    small: dict[str, Any] = imported.small()
    whole: dict[str, Any] = imported.with_parameters({}).info.parameters

    assert small
    assert all(value < whole[key] for key, value in small.items())


@pytest.mark.parametrize(
    ("name", "parameters", "found", "answer"),
    [
        ("mlp.py", {}, {}, Outcome.EQUAL),
        (
            "gpt2.py",
            {"seq_len": "32", "layers": "2", "width": "48", "vocabulary": "500"},
            {"MF401": "self.dropout("},
            Outcome.EQUAL,
        ),
        (
            "gpt2.py",
            {"seq_len": "8", "layers": "1", "width": "48", "vocabulary": "500", "dropout": "0"},
            {},
            Outcome.EQUAL,
        ),
        (
            "resnet50.py",
            {"image": "32", "classes": "10"},
            {"MF301": "return F.cross_entropy("},
            Outcome.DIFFERENT,
        ),
    ],
    ids=["mlp", "gpt2", "gpt2-without-dropout", "resnet50"],
)
def test_an_example_has_exactly_the_true_remarks(
    name: str, parameters: dict[str, Any], found: dict[str, str], answer: Outcome
) -> None:
    checked = check_target(str(EXAMPLES / name), logical_batch=4, parameters=parameters)

    assert [f.code for f in checked.findings] == list(found)
    assert outcome(checked) is answer
    assert all(c.equal for c in checked.comparisons)
    assert {len(set(c.sizes)) > 1 for c in checked.comparisons} == {True, False}
    for seen in checked.findings:
        assert seen.place is not None
        assert found[seen.code] in seen.place.code
        assert seen.place.file.endswith(name)
