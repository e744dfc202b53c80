"""A gate's result as Markdown, workflow commands and JUnit XML."""

from __future__ import annotations

import re
from dataclasses import replace
from xml.etree import ElementTree as ET

import pytest

from memfit.export.gate import github, junit, markdown, sentence
from memfit.gate import Comparison, Difference, GateResult, Limits, compare
from memfit.units import GIB, MIB
from tests.gate.test_gate import BASE, entry, ledger, row

SAME = compare(entry(), entry(), Limits())
MORE = compare(
    entry(rows=ledger(row("activations", "layers.[0-3].mlp", "h = a|b < `c`", BASE, line=41))),
    entry(
        BASE + GIB,
        rows=ledger(row("activations", "layers.[0-3].mlp", "h = a|b < `c`", BASE + GIB, line=41)),
    ),
    Limits(),
)
LESS = compare(entry(), entry(BASE - GIB), Limits())
OTHER = Comparison(
    name="b.py on l4, fp32",
    target="b.py",
    mark="x",
    verdict="not comparable",
    source=None,
    reasons=("torch was 2.8 and is 2.9",),
    differences=(Difference(field="torch", before="2.8", now="2.9"),),
)
BROKEN = replace(OTHER, mark="!", verdict="failed", reasons=("it does not run any more",))


def result(*workloads: Comparison) -> GateResult:
    return GateResult(
        memfit="1",
        baseline="memfit-baseline.json",
        limits=Limits(),
        passed=not any(w.fails for w in workloads),
        workloads=workloads,
    )


ALL = result(SAME, MORE, LESS, OTHER, BROKEN)


def test_a_sentence_counts_what_failed_and_says_virtual() -> None:
    assert sentence(ALL) == (
        "failed: of 5 workloads, 1 needs more memory, 1 is over a limit or does not run any more, "
        "1 cannot be compared (virtual)"
    )
    assert sentence(result(SAME)).startswith("passed: 1 workload within the limits")


def test_markdown_has_a_row_for_each_workload_with_its_mark() -> None:
    rows = [line for line in markdown(ALL).splitlines() if line.startswith("| `")]

    assert [line[3] for line in rows[:5]] == [" ", "+", "-", "x", "!"]
    assert "10.00 GiB → 11.00 GiB (+1.00 GiB, +10.0%)" in rows[1]
    assert "(virtual)" in rows[1]


def test_markdown_tells_what_grew_and_no_text_breaks_its_table() -> None:
    text = markdown(ALL)
    (change,) = [line for line in text.splitlines() if line.startswith("| +1.00 GiB |")]

    assert "layers.[0-3].mlp | model.py:41 | `h = a\\|b &lt; c`" in change
    assert len(re.findall(r"(?<!\\)\|", change)) == 6


def test_a_very_long_result_still_fits_a_summary() -> None:
    many = replace(MORE, changes=tuple(replace(MORE.changes[0], bytes=i) for i in range(20_000)))

    assert len(markdown(result(many)).encode()) < 1_000_000


def test_each_failure_has_one_annotation_at_the_line_to_blame() -> None:
    lines = github(ALL)

    assert len(lines) == 3
    assert lines[0].startswith(
        "::error file=model.py,line=41,title=memfit gate%3A m.py on rtx-4090%2C"
    )
    assert "+1.00 GiB activations, layers.[0-3].mlp, model.py:41" in lines[0]
    assert lines[1].startswith("::error file=memfit-baseline.json,title=")
    assert not any("\n" in line for line in lines)
    assert "(+10.0%25)" in lines[0]


def test_a_gate_that_passes_has_no_annotation() -> None:
    assert github(result(SAME, LESS)) == []


def test_junit_is_read_back_with_its_counts_and_messages() -> None:
    suites = ET.fromstring(junit(ALL))
    failures = suites.findall(".//failure")
    cases = suites.findall(".//testcase")

    assert suites.get("tests") == str(len(cases))
    assert suites.get("failures") == str(len(failures)) == "3"
    assert suites.get("errors") == str(len(suites.findall(".//error"))) == "1"
    assert "+1.00 GiB" in (failures[0].get("message") or "")
    assert "layers.[0-3].mlp, model.py:41" in (failures[0].text or "")
    names = [(case.get("classname"), case.get("name")) for case in cases]
    assert ("m.py on rtx-4090, fp32", "backward allocated") in names


def test_junit_of_one_workload_has_no_name_twice() -> None:
    suites = ET.fromstring(junit(result(MORE, OTHER)))
    names = [(c.get("classname"), c.get("name")) for c in suites.findall(".//testcase")]

    assert len(names) == len(set(names))


@pytest.mark.parametrize("text", ["\x1b[31mred", "\x00", "<&>\"'"])
def test_junit_holds_any_text(text: str) -> None:
    suites = ET.fromstring(junit(result(replace(BROKEN, reasons=(text,)))))

    assert suites.findall(".//failure")


def test_a_limit_that_is_passed_is_a_failure_of_its_own() -> None:
    over = compare(entry(), entry(), Limits(limit_bytes=MIB))
    (failure,) = ET.fromstring(junit(result(over))).findall(".//failure")

    assert "the limit is 1.00 MiB" in (failure.get("message") or "")
