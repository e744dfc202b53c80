"""Loops over replicas and rare turns, judged by tables of events."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memfit.verification import Outcome, Place, Severity
from memfit.verify.across import over_replicas
from memfit.verify.catalogue import CATALOGUE
from memfit.verify.events import Event, Expected
from memfit.verify.findings import decide, finding
from memfit.verify.judge import judge

PLACE = Place(file="train.py", line=7, code="loss.backward()")


def backward(factor: float, elements: int, digest: int, **facts: object) -> Event:
    event = Event(
        kind="backward",
        place=PLACE,
        factor=factor,
        reduction="mean",
        elements=elements,
        digest=digest,
        cleared=True,
    )
    return replace(event, **facts)  # type: ignore[arg-type]


STEP = Event(kind="step", place=PLACE)


@pytest.mark.parametrize(
    ("code", "shares", "digests", "sums"),
    [
        (None, (0.5, 1.5), (1, 2), (4.0, 4.0)),
        ("MF701", (0.5, 1.5), (1, 1), (4.0, 4.0)),
        ("MF702", (1.0, 1.0), (1, 2), (4.0, 4.0)),
        ("MF703", (0.25, 0.75), (1, 2), (4.0, 4.0)),
        ("MF704", (0.5, 1.5), (1, 2), (4.0, 4.1)),
    ],
)
def test_ranks_are_judged_beside_one_another(
    code: str | None,
    shares: tuple[float, float],
    digests: tuple[int, int],
    sums: tuple[float, float],
) -> None:
    ranks = [
        [backward(share, elements, digest), STEP]
        for share, elements, digest in zip(shares, (512, 1536), digests, strict=True)
    ]
    found = over_replicas(ranks, sums)

    assert [f.code for f in found] == ([code] if code else [])
    assert all(f.place == PLACE for f in found)


def test_512_tokens_at_2_and_1536_at_4_are_told_as_a_mean_of_means() -> None:
    events = [
        backward(0.5, 512, 1),
        backward(0.5, 1536, 2, cleared=False),
        replace(STEP, error=0.3),
    ]
    found, seen = judge(events, expected=Expected(), ended="by itself")

    assert [f.code for f in found] == ["MF201"]
    assert "512, 1,536" in found[0].evidence
    assert "off by 0.3" in found[0].evidence
    assert seen.groups[0].factors == (0.5, 0.5)


def test_a_scale_that_differs_within_a_group_is_found_without_an_update() -> None:
    first = backward(0.5, 8, 1, scale=1024.0)
    events = [first, backward(0.5, 8, 2, scale=512.0, cleared=False)]
    events.append(STEP)
    found, _ = judge(events, expected=Expected(), ended="by itself")
    assert [f.code for f in found] == ["MF507"]


def test_a_group_that_the_time_cut_short_is_no_finding() -> None:
    events = [backward(1.0, 8, 1), STEP, backward(1.0, 8, 2)]
    assert judge(events, expected=Expected(), ended="time")[0] == []
    assert [f.code for f in judge(events, expected=Expected(), ended="by itself")[0]] == ["MF511"]


@pytest.mark.parametrize(
    ("code", "compared", "accepted", "outcome"),
    [
        (None, True, False, Outcome.EQUAL),
        (None, False, False, Outcome.UNKNOWN),
        ("MF201", True, False, Outcome.DIFFERENT),
        ("MF301", True, False, Outcome.DIFFERENT),
        ("MF301", True, True, Outcome.EQUAL),
        ("MF401", True, False, Outcome.EQUAL),
        ("MF104", False, False, Outcome.UNKNOWN),
        ("MF208", True, False, Outcome.UNKNOWN),
        ("MF509", True, False, Outcome.EQUAL),
    ],
)
def test_findings_lead_to_an_answer(
    code: str | None, compared: bool, accepted: bool, outcome: Outcome
) -> None:
    findings = [replace(finding(code, "Seen."), accepted=accepted)] if code else []
    assert decide(findings, compared=compared) is outcome


@pytest.mark.parametrize("code", sorted(CATALOGUE))
def test_every_page_says_what_it_is_and_what_to_do(code: str) -> None:
    page = CATALOGUE[code]

    assert page.code == code
    assert page.severity in Severity
    assert page.meaning.endswith((".", ")."))
    assert page.remedy
    assert not page.remedy.endswith(".")
    assert not page.title.endswith(".")
