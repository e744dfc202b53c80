"""Findings under the words of the catalogue, and the answer that they lead to."""

from __future__ import annotations

from collections.abc import Sequence

from memfit.errors import UsageError
from memfit.verification import Finding, Outcome, Place, Severity
from memfit.verify.catalogue import CATALOGUE, Page


def find_page(code: str) -> Page:
    """Return the page of a code.

    Raises:
        UsageError: When there is no such code.
    """
    found = CATALOGUE.get(code.strip().upper())
    if found is None:
        raise UsageError(f"there is no finding {code!r}", hint=f"there are {', '.join(CATALOGUE)}")
    return found


def finding(
    code: str, evidence: str, *, place: Place | None = None, severity: Severity | None = None
) -> Finding:
    """Make a finding: what was seen, under the words of the catalogue."""
    page = CATALOGUE[code]
    return Finding(
        code=code,
        severity=severity or page.severity,
        title=page.title,
        evidence=evidence,
        remedy=page.remedy,
        place=place,
    )


_DECIDING = frozenset({"MF209", "MF301"})
"""Warnings that say that the gradients are not equal."""
_OPEN = frozenset({"MF104", "MF106", "MF208"})
"""Warnings that leave equality unknown."""


def decide(findings: Sequence[Finding], *, compared: bool) -> Outcome:
    """Return the answer that findings lead to.

    Args:
        findings: All of them; those that the user accepted do not count.
        compared: Whether anything was compared that could have shown a difference.
    """
    counting = [f for f in findings if not f.accepted]
    if any(f.severity is Severity.ERROR or f.code in _DECIDING for f in counting):
        return Outcome.DIFFERENT
    if not compared or any(f.code in _OPEN for f in counting):
        return Outcome.UNKNOWN
    return Outcome.EQUAL
