"""The page of a probe."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser

import matplotlib as mpl
import msgspec
import pytest

from memfit.records import (
    Certificate,
    Composition,
    Ledger,
    LedgerPeak,
    LedgerRow,
    ProbeResult,
    Verdict,
)
from memfit.report import render
from memfit.report.figures import parts, thin
from memfit.report.page import embed, phase_rows, shorten, stress_virtual
from memfit.report.words import TIMES
from memfit.units import GIB
from tests import sample

BUDGET = 300_000
VOID = {"meta", "link", "br", "img", "hr", "input"}


class Outline(HTMLParser):
    """What tests ask about a page: its tags, ids, text and whether every tag is closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.unbalanced: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(page)
        self.close()
        self.unbalanced += self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.unbalanced.append(tag)

    def handle_data(self, data: str) -> None:
        if not {"script", "style"} & set(self.open):
            self.text.append(data)

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.tags)

    def values(self, attribute: str) -> list[str]:
        return [attrs[attribute] or "" for _, attrs in self.tags if attribute in attrs]


PAGES = {
    name: render(getattr(sample, name)()) for name in ("gpt2", "with_hole", "on_cpu", "hostile")
}
OUTLINES = {name: Outline(page) for name, page in PAGES.items()}
every_page = pytest.mark.parametrize("name", list(PAGES))


def long_search() -> ProbeResult:
    """The longest search: 40 trials, and a group of 480 microbatches."""
    trials = tuple(sample.gpu_trial(i, 1 + i % 20, fits=i % 3 > 0) for i in range(1, 40))
    last = sample.gpu_trial(40, 1, fits=True, purpose="confirm")
    given = Certificate(microbatch=1, trial=40, ceiling="budget", tried_above=())
    return sample.probe((*trials, last), given, logical_batch=480)


@every_page
def test_the_same_record_gives_the_same_bytes(name: str) -> None:
    assert render(getattr(sample, name)()) == PAGES[name]


def test_a_users_own_matplotlib_style_changes_nothing() -> None:
    with mpl.rc_context({"axes.grid": True, "font.size": 20, "lines.linewidth": 9}):
        assert render(sample.gpt2()) == PAGES["gpt2"]


def test_settings_of_matplotlib_are_left_as_they_were() -> None:
    before = dict(mpl.rcParams)
    render(sample.gpt2())
    assert dict(mpl.rcParams) == before


@every_page
def test_a_page_stays_below_its_budget(name: str) -> None:
    assert len(PAGES[name].encode()) < BUDGET


def test_a_very_long_search_stays_below_the_budget_and_says_what_it_left_out() -> None:
    page = render(long_search())
    assert len(page.encode()) < BUDGET
    assert "without its timeline" in page
    assert "too many microbatches to shade" in page


@every_page
def test_a_page_needs_nothing_from_outside(name: str) -> None:
    page = PAGES[name]
    outline = OUTLINES[name]
    assert not re.search(r"https?://|//cdn|@import|url\((?!#)", page)
    assert not outline.values("src")
    assert all(value.startswith("#") for value in outline.values("href"))
    assert not outline.count("link")


@every_page
def test_a_page_has_no_script_but_the_embedded_data(name: str) -> None:
    kinds = [attrs.get("type") for tag, attrs in OUTLINES[name].tags if tag == "script"]
    assert kinds == ["application/json"]
    assert not [a for _, attrs in OUTLINES[name].tags for a in attrs if a.startswith("on")]
    assert "default-src 'none'; style-src 'unsafe-inline'; img-src data:" in PAGES[name]


@every_page
def test_every_tag_is_closed_in_order(name: str) -> None:
    assert OUTLINES[name].unbalanced == []


@every_page
def test_ids_are_unique_and_every_reference_meets_one(name: str) -> None:
    ids = OUTLINES[name].values("id")
    assert len(ids) == len(set(ids))
    references = set(re.findall(r"url\(#([^)]+)\)", PAGES[name]))
    references |= {value[1:] for value in OUTLINES[name].values("href")}
    references |= {i for value in OUTLINES[name].values("aria-labelledby") for i in value.split()}
    assert references <= set(ids)


@every_page
def test_every_chart_is_described_and_followed_by_a_table_with_scopes(name: str) -> None:
    outline = OUTLINES[name]
    charts = [attrs for tag, attrs in outline.tags if tag == "svg"]
    assert charts
    assert all(a["role"] == "img" and a["aria-labelledby"] for a in charts)
    order = [tag for tag, _ in outline.tags if tag in ("figure", "table")]
    for position, tag in enumerate(order):
        if tag == "figure":
            assert order[position + 1] == "table"
    assert all("scope" in attrs for tag, attrs in outline.tags if tag == "th")


@every_page
def test_a_page_has_a_language_and_landmarks(name: str) -> None:
    outline = OUTLINES[name]
    assert dict(outline.tags)["html"]["lang"] == "en"
    assert {outline.count(tag) for tag in ("main", "nav", "footer", "h1", "header")} == {1}


def test_charts_carry_their_text_as_text_and_their_colours_from_the_page() -> None:
    charts = "".join(re.findall(r"<svg.*?</svg>", PAGES["gpt2"], re.DOTALL))
    assert "limit 23.05 GiB" in charts
    assert "20: the answer" in charts
    assert not re.search(r"#[0-9a-f]{6}\b", charts)
    assert "currentColor" in charts


def test_a_virtual_page_says_so_in_title_answer_captions_and_an_explanation() -> None:
    page = PAGES["gpt2"]
    assert "virtual" in re.findall(r"<title>(.*?)</title>", page)[0]
    assert "on a <em>virtual</em> NVIDIA" in re.findall(r"<h1.*?</h1>", page, re.DOTALL)[0]
    for caption in re.findall(r"<(?:fig)?caption>.*?</(?:fig)?caption>", page, re.DOTALL):
        assert "virtual" in caption
    assert "no kernel was executed" in page


def test_a_measured_page_does_not_say_virtual() -> None:
    assert "virtual" not in "".join(OUTLINES["on_cpu"].text)


def test_what_was_not_measured_is_said_to_be_so() -> None:
    text = " ".join("".join(OUTLINES["on_cpu"].text).split())
    assert "Composition: not measured" in text
    assert "Timeline: not measured" in text
    assert "None" not in text
    assert "0 B" not in text


def test_hostile_words_stay_words() -> None:
    outline = OUTLINES["hostile"]
    assert not outline.count("img")
    assert outline.count("script") == 1
    assert "<script>alert('x')</script>" in "".join(outline.text)


def test_the_record_can_be_read_back_from_the_page() -> None:
    found = re.search(r'id="memfit-result">(.*?)</script>', PAGES["hostile"], re.DOTALL)
    assert found is not None
    assert msgspec.json.decode(found[1], type=ProbeResult) == sample.hostile()


def test_the_embedded_record_has_no_angle_bracket() -> None:
    data, whole = embed(sample.hostile())
    assert "<" not in data
    assert whole


def test_the_page_warns_of_a_size_that_does_not_fit_below_the_answer() -> None:
    assert "14 did not fit although 15 does" in PAGES["with_hole"]
    assert "did not fit although" not in PAGES["gpt2"]


def test_the_page_tells_every_trial() -> None:
    rows = re.findall(r'<th scope="rowgroup" rowspan="2" class="n">(\d+)</th>', PAGES["gpt2"])
    assert rows == ["1", "2", "3", "4", "5", "6"]


def test_tables_carry_exact_bytes() -> None:
    peak = sample.gpt2().answer.peak_bytes
    assert f'<data value="{peak}" title="{peak:,} bytes">21.79 GiB</data>' in PAGES["gpt2"]


def test_a_search_of_one_trial_has_a_page() -> None:
    trial = sample.gpu_trial(1, 1, fits=True, purpose="confirm", logical_batch=1)
    given = Certificate(microbatch=1, trial=1, ceiling="cap", tried_above=(), cap=1)
    outline = Outline(render(sample.probe((trial,), given, logical_batch=1)))
    assert "gradients come into being while activations go" in "".join(outline.text)


def test_devices_of_several_ranks_are_told_apart() -> None:
    result = sample.gpt2()
    first = result.answer.devices[0]
    answer = replace(result.answer, devices=(first, replace(first, rank=1, device=1)))
    page = render(replace(result, trials=(*result.trials[:-1], answer)))
    assert "Rank 0, device 0" in page
    assert "Rank 1, device 1" in page


def test_other_verdicts_have_marks_and_words_of_their_own() -> None:
    result = sample.gpt2()
    thrash = replace(result.trials[2], verdict=Verdict.THRASH, demand_bytes=None)
    charts = render(replace(result, trials=(*result.trials[:2], thrash, *result.trials[3:])))
    assert "does not fit: thrashes" in charts
    assert "does not fit: out of memory" in charts


def test_parts_of_the_peak_sum_to_the_limit() -> None:
    result = sample.gpt2()
    made_of = result.answer.composition
    assert made_of is not None
    assert sum(part.size for part in parts(result, made_of)) == result.spec.device.limit_bytes


def test_the_process_before_the_workload_is_a_part_of_its_own() -> None:
    result = sample.on_cpu()
    made_of = Composition(
        phase="backward",
        parameters_bytes=GIB,
        buffers_bytes=0,
        gradients_bytes=GIB,
        optimizer_state_bytes=2 * GIB,
        activations_bytes=3 * GIB,
        baseline_bytes=GIB,
    )
    trials = (*result.trials[:-1], replace(result.answer, composition=made_of))
    page = render(replace(result, trials=trials))
    assert "the process before the workload" in page
    assert "reserved by the allocator" not in page


def test_the_largest_blocks_are_told_by_module_and_line() -> None:
    result = sample.gpt2()
    row = LedgerRow(
        category="activations",
        module="layers.[0-11].mlp",
        place="model.py:41",
        function="forward",
        text="h = self.up(x)",
        bytes=(GIB,),
        blocks=(12,),
    )
    peak = LedgerPeak(phase="backward", groups="later", allocated_bytes=GIB)
    told = replace(result.answer, ledger=Ledger(peaks=(peak,), rows=(row,)))
    trials = tuple(told if t is result.answer else t for t in result.trials)
    page = render(replace(result, trials=trials))
    assert "<td>layers.[0-11].mlp</td><td>model.py:41</td>" in page
    assert "Noted in a shorter group, which peaks at 1.00 GiB; the answer" in page
    assert "The largest parts by module and line" not in render(result)


def test_a_timeline_is_summed_up_phase_by_phase() -> None:
    rows = phase_rows(sample.timeline(2, 4))
    assert [(row.name, row.microbatch) for row in rows] == [
        ("forward", 1),
        ("backward", 1),
        ("forward", 2),
        ("backward", 2),
        ("the optimizer step", None),
    ]
    assert rows[0].highest_bytes == sample.PARAMETERS + sample.OPTIMIZER + 4 * sample.PER_EXAMPLE


def test_a_long_table_of_phases_keeps_its_ends_and_its_peak() -> None:
    rows = phase_rows(sample.timeline(100, 1))
    shown, left_out = shorten(rows)
    assert len(shown) + left_out == len(rows)
    assert (shown[0], shown[-1]) == (rows[0], rows[-1])
    assert max(row.highest_bytes or 0 for row in shown) == max(
        row.highest_bytes or 0 for row in rows
    )


def test_a_thinned_curve_keeps_its_highest_and_lowest_points() -> None:
    curve = [(event, (event * 7919) % 1000) for event in range(5000)]
    kept = thin(curve, 100)
    assert len(kept) <= 102
    assert kept == sorted(kept)
    assert {max(size for _, size in kept), min(size for _, size in kept)} == {999, 0}


def test_sizes_and_products_are_not_broken_across_lines() -> None:
    told = f"20 {TIMES} 24 and 1.50 GiB"
    assert stress_virtual(told) == f"20&nbsp;{TIMES}&nbsp;24 and 1.50&nbsp;GiB"


def test_stressing_a_word_escapes_the_rest() -> None:
    assert stress_virtual("a virtual <b>") == "a <em>virtual</em> &lt;b&gt;"
