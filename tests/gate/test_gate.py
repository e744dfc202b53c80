"""A measurement beside its baseline, in figures made up for the purpose."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.baseline import DevicePeaks, Entry, Fingerprint, PhasePeaks, Setting
from memfit.gate import Change, Limits, changes_of, compare
from memfit.records import Category, Ledger, LedgerPeak, LedgerRow, Precision, Source
from memfit.units import GIB, MIB

BASE = 10 * GIB


def row(
    category: Category, module: str, text: str, size: int, *, line: int = 1, file: str = "model.py"
) -> LedgerRow:
    return LedgerRow(
        category=category,
        module=module,
        place=f"{file}:{line}",
        function="forward",
        text=text,
        bytes=(size,),
        blocks=(1,),
    )


def ledger(*rows: LedgerRow) -> Ledger:
    total = sum(r.bytes[0] for r in rows)
    return Ledger(
        peaks=(LedgerPeak(phase="backward", groups="later", allocated_bytes=total),), rows=rows
    )


def entry(allocated: int = BASE, *, used: int | None = None, rows: Ledger | None = None) -> Entry:
    peaks = PhasePeaks(
        phase="backward",
        allocated_bytes=allocated,
        reserved_bytes=allocated + MIB,
        used_bytes=used or allocated + GIB,
    )
    return Entry(
        setting=Setting(target="m.py", device="rtx-4090", microbatch=4, accumulation_steps=2),
        fingerprint=Fingerprint(
            workload="M",
            parameters={"width": 8},
            card="RTX 4090",
            card_bytes=24 * GIB,
            torch="2.9",
            cuda="13.0",
            cudnn=None,
            driver=None,
            precision=Precision.FP32,
            clip_norm=None,
            allocator={},
            microbatch=4,
            accumulation_steps=2,
            replicas=1,
        ),
        source=Source.VIRTUAL,
        devices=(DevicePeaks(rank=0, device=0, phases=(peaks,)),),
        ledger=rows,
    )


@pytest.mark.parametrize(
    ("delta", "verdict", "mark"),
    [
        (0, "same", " "),
        (1, "within limits", "~"),
        (BASE // 50, "within limits", "~"),
        (BASE // 50 + 1, "more", "+"),
        (-(BASE // 50) - 1, "less", "-"),
        (-1, "within limits", "~"),
    ],
)
def test_an_increase_fails_above_its_share(delta: int, verdict: str, mark: str) -> None:
    found = compare(entry(), entry(BASE + delta), Limits())

    assert (found.verdict, found.mark) == (verdict, mark)
    assert found.fails == (verdict == "more")


@pytest.mark.parametrize(("delta", "mark"), [(16 * MIB, "~"), (16 * MIB + 1, "+")])
def test_a_small_peak_may_grow_by_the_least_difference(delta: int, mark: str) -> None:
    assert compare(entry(50 * MIB), entry(50 * MIB + delta), Limits()).mark == mark


def test_what_a_device_uses_in_all_may_be_limited() -> None:
    found = compare(entry(), entry(), Limits(limit_bytes=BASE))

    assert found.verdict == "failed"
    assert "11.00 GiB, and the limit is 10.00 GiB" in found.reasons[0]
    assert not compare(entry(), entry(), Limits(limit_bytes=BASE + GIB)).fails


@pytest.mark.parametrize(
    ("before", "now", "mark", "fails"),
    [
        (True, True, " ", False),
        (None, True, " ", False),
        (True, False, "!", True),
        (None, False, "!", True),
        (False, False, " ", False),
        (False, True, "*", False),
    ],
)
def test_a_group_must_go_on_fitting_on_other_cards(
    before: bool | None, now: bool, mark: str, fails: bool
) -> None:
    old = replace(entry(), fits_on={} if before is None else {"rtx-3090": before})
    found = compare(old, replace(entry(), fits_on={"rtx-3090": now}), Limits())

    assert found.fits[0].mark == mark
    assert found.fails == fails


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"torch": "2.10"}, "torch"),
        ({"card": "H100"}, "card"),
        ({"microbatch": 8}, "microbatch"),
        ({"parameters": {"width": 16}}, "parameters.width"),
        ({"parameters": {}}, "parameters.width"),
        ({"allocator": {"PYTORCH_ALLOC_CONF": "x"}}, "allocator.PYTORCH_ALLOC_CONF"),
    ],
)
def test_what_was_measured_on_something_else_is_not_compared(
    change: dict[str, Any], field: str
) -> None:
    now = entry(2 * BASE)
    other = replace(now, fingerprint=replace(now.fingerprint, **change))
    found = compare(entry(), other, Limits())

    assert (found.verdict, found.mark, found.fails) == ("not comparable", "x", True)
    assert [d.field for d in found.differences] == [field]
    assert field in found.reasons[0]
    assert found.figures == ()


def test_a_baseline_of_another_source_is_not_compared() -> None:
    real = replace(entry(), source=Source.MEASURED)

    assert compare(entry(), real, Limits()).differences[0].field == "source"


def test_growth_is_told_by_category_module_and_line_the_largest_first() -> None:
    before = ledger(row("activations", "layers.[0-3].mlp", "h = self.up(x)", 400, line=41))
    now = ledger(
        row("activations", "layers.[0-3].mlp", "h = self.up(x)", 800, line=43),
        row("temporary", "", "y = x * 2", 100, line=50),
    )

    assert changes_of(before, now, "backward") == [
        Change(
            category="activations",
            module="layers.[0-3].mlp",
            place="model.py:43",
            text="h = self.up(x)",
            bytes=400,
        ),
        Change(category="temporary", module="", place="model.py:50", text="y = x * 2", bytes=100),
    ]


@pytest.mark.parametrize(
    "now",
    [
        row("activations", "a.up", "h = f(x)", 100, line=99),
        row("activations", "a.up", "inner = f(x)", 100),
        row("activations", "a.widen", "h = f(x)", 100),
        row("activations", "a.up", "h = f(x)", 100, file="net.py"),
        row("activations", "a.widen", "inner = f(x)", 100, line=3, file="net.py"),
    ],
    ids=["moved", "rewritten", "renamed module", "renamed file", "all of them"],
)
def test_what_only_has_another_name_is_no_change(now: LedgerRow) -> None:
    assert (
        changes_of(ledger(row("activations", "a.up", "h = f(x)", 100)), ledger(now), "backward")
        == []
    )


def test_a_rewritten_line_has_only_its_growth() -> None:
    before = ledger(row("activations", "a", "h = f(x)", 100))
    now = ledger(row("activations", "a", "h = f(x).double()", 200))

    (change,) = changes_of(before, now, "backward")
    assert (change.bytes, change.text) == (100, "h = f(x).double()")


def test_what_moved_between_siblings_leaves_the_growth_at_its_line() -> None:
    before = ledger(
        row("activations", "blocks.[0-3].up", "h = gelu(self.up(x))", 40),
        row("activations", "blocks.[0-3]", "h = gelu(self.up(x))", 40),
    )
    now = ledger(
        row("activations", "blocks.[0-3]", "h = gelu(self.up(x).float())", 80),
        row("activations", "blocks.[0-3].down", "y = self.down(h)", 40, line=2),
    )
    (change,) = changes_of(before, now, "backward")

    assert (change.module, change.text, change.bytes) == (
        "blocks.[0-3]",
        "h = gelu(self.up(x).float())",
        40,
    )


def test_state_and_gradients_of_added_parameters_are_blamed_on_their_line() -> None:
    now = ledger(
        row("parameters", "head", "self.head = Linear()", 100, line=5),
        row("gradients", "head", "y = self.head(x)", 100, line=9),
        row("optimizer state", "head", "return AdamW()", 200, line=20),
    )
    found = changes_of(ledger(), now, "backward")

    assert {c.place for c in found} == {"model.py:5"}
    assert [c.category for c in found] == ["optimizer state", "gradients", "parameters"]


_ROWS = st.lists(
    st.builds(
        row,
        st.sampled_from(["activations", "temporary"]),
        st.sampled_from(["", "a.0", "a.1", "b"]),
        st.sampled_from(["x = 1", "y = 2", "z = 3"]),
        st.integers(0, 3),
        line=st.integers(1, 3),
    ),
    max_size=8,
)


@given(_ROWS, _ROWS)
def test_changes_always_sum_to_the_change_of_the_peak(
    before: list[LedgerRow], now: list[LedgerRow]
) -> None:
    changes = changes_of(ledger(*before), ledger(*now), "backward")

    assert sum(c.bytes for c in changes) == sum(r.bytes[0] for r in now) - sum(
        r.bytes[0] for r in before
    )
    assert all(c.bytes for c in changes)


@given(_ROWS)
def test_nothing_changed_where_all_rows_are_the_same(rows: list[LedgerRow]) -> None:
    assert changes_of(ledger(*rows), ledger(*reversed(rows)), "backward") == []
