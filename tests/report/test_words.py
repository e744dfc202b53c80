"""Sentences about a result."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from memfit.records import Certificate, Split, TriedAbove, Verdict
from memfit.report import words
from memfit.story import tell
from tests import sample

X = words.TIMES


def test_the_answer_is_one_sentence_with_the_split_the_peak_and_the_limit() -> None:
    assert words.answer(sample.gpt2()) == (
        f"Train with microbatch 20 and 24 accumulation steps: 20 {X} 24 {X} 1 = 480, "
        "peak 21.79 GiB of 23.05 GiB on a virtual NVIDIA GeForce RTX 4090."
    )


def test_the_answer_of_a_real_device_says_measured_and_not_virtual() -> None:
    told = words.answer(sample.on_cpu())
    assert "measured on CPU (8 cores)" in told
    assert "virtual" not in told


def test_the_answer_says_when_no_logical_batch_was_asked_for() -> None:
    result = sample.gpt2()
    bare = replace(result, split=replace(result.split, logical_batch=None))
    assert "no logical batch was asked for" in words.answer(bare)
    assert "480" not in words.answer(bare)


def test_the_answer_names_the_replicas() -> None:
    result = sample.gpt2()
    split = Split(microbatch=20, accumulation_steps=12, replicas=2, logical_batch=480)
    told = words.answer(replace(result, split=split))
    assert f"on 2 replicas: 20 {X} 12 {X} 2 = 480" in told


def test_a_peak_that_was_not_measured_is_said_to_be_so() -> None:
    result = sample.on_cpu()
    blind = replace(
        result,
        trials=(*result.trials[:-1], sample.cpu_trial(3, 64, None, purpose="confirm")),
    )
    assert "its peak was not measured, the limit is 12.00 GiB" in words.answer(blind)
    assert words.headroom_left(blind) is None


@pytest.mark.parametrize(
    ("split", "expected"),
    [
        (Split(microbatch=20, accumulation_steps=24, logical_batch=480), f"20 {X} 24 {X} 1 = 480"),
        (
            Split(microbatch=22, accumulation_steps=3, logical_batch=64),
            f"(22 + 21 + 21) {X} 1 = 64",
        ),
        (
            Split(microbatch=3, accumulation_steps=5, replicas=2, logical_batch=28),
            f"(4 {X} 3 + 1 {X} 2) {X} 2 = 28",
        ),
    ],
)
def test_arithmetic_adds_up_to_the_logical_batch(split: Split, expected: str) -> None:
    assert words.arithmetic(split) == expected


def test_uneven_microbatches_are_named_in_the_instruction() -> None:
    split = Split(microbatch=22, accumulation_steps=3, logical_batch=64)
    assert words.instruction(split) == "microbatches of 22 and 21 and 3 accumulation steps"


def test_the_title_says_virtual() -> None:
    assert "on a virtual NVIDIA GeForce RTX 4090" in words.title(sample.gpt2())


def test_the_certificate_says_what_ran_and_what_was_tried_above() -> None:
    assert words.certificate(sample.gpt2()) == (
        "Microbatch 20 ran 2 full groups of 24 microbatches in trial 6, in a fresh process. "
        "Above it, 24 (trial 4: out of memory, 25.47 GiB needed) was tried and did not fit; "
        "the demand of 24 alone exceeds the limit of 23.05 GiB, whatever the allocator's layout."
    )


def test_the_certificate_at_the_cap_says_that_nothing_larger_exists() -> None:
    told = words.certificate(sample.on_cpu())
    assert told.endswith("No larger candidate exists: the cap is 64.")
    assert "2 full groups of 1 microbatch in trial 3" in told


def test_the_certificate_out_of_budget_lists_what_was_not_tried() -> None:
    result = sample.gpt2()
    given = Certificate(
        microbatch=20, trial=6, ceiling="budget", tried_above=(), untried=(21, 22, 23, 24, 25, 26)
    )
    told = words.certificate(replace(result, certificate=given))
    assert "ceiling of 40 trials was reached first, so 21, 22, 23, 24 and 2 more" in told


def test_sizes_tried_above_are_told_nearest_first() -> None:
    result = sample.with_hole()
    given = replace(
        result.certificate,
        microbatch=13,
        trial=1,
        tried_above=(
            TriedAbove(microbatch=16, trial=2, verdict=Verdict.OOM, demand_exceeds_limit=True),
            TriedAbove(microbatch=14, trial=3, verdict=Verdict.OOM, demand_exceeds_limit=False),
        ),
    )
    told = words.certificate(replace(result, certificate=given))
    assert "14 (trial 3: out of memory) and 16 (trial 2: out of memory, 17.75 GiB" in told
    assert "were tried and did not fit; the demand of 16 alone" in told


def test_a_hole_below_the_answer_is_warned_of() -> None:
    assert words.holes(sample.with_hole()) == (14,)
    assert "14 did not fit although 15 does" in (words.hole_sentence(sample.with_hole()) or "")


def test_no_hole_gives_no_warning() -> None:
    assert words.hole_sentence(sample.gpt2()) is None


def test_the_story_says_what_each_trial_changed() -> None:
    result = sample.with_hole()
    told = [chapter.change for chapter in tell(result.trials, result.certificate)]
    assert told == [
        "The answer is at least 13, if full groups agree.",
        "Closes 16 and everything above it: its demand alone exceeds the limit.",
        "14 is out as the allocator laid it out; larger sizes stay open.",
        "Raises the floor from 13 to 15.",
        "Certifies 15: full groups ran in a fresh process. This is the answer.",
    ]


def test_a_diagnosis_is_never_told_as_a_fit() -> None:
    result = sample.gpt2()
    diagnosis = sample.gpu_trial(7, 1, fits=True, purpose="diagnose")
    last = tell((*result.trials, diagnosis), result.certificate)[-1]
    assert "never a fit" in last.change
    assert "fits" not in words.trial_line(diagnosis)


def test_a_line_of_progress_for_a_fit_has_its_peak_limit_and_source() -> None:
    line = words.trial_line(sample.gpu_trial(3, 16, fits=True))
    assert line.startswith(f"trial 3: microbatch 16 {X} 2 of 30 ")
    assert line.endswith("fits: peak 17.93 GiB of 23.05 GiB (virtual)  0.24 s")


def test_a_line_of_progress_names_a_setting_of_the_allocator() -> None:
    trial = sample.gpu_trial(3, 16, fits=True)
    trial = replace(trial, spec=replace(trial.spec, allocator="expandable_segments:True"))
    assert words.trial_line(trial).endswith("(virtual), with expandable_segments:True  0.24 s")


def test_a_line_of_progress_for_a_failure_says_where_and_how_much() -> None:
    line = words.trial_line(sample.gpu_trial(4, 24, fits=False))
    assert "out of memory (backward, group 1, microbatch 1): 25.47 GiB needed of 23.05" in line


def test_a_line_of_progress_for_a_doubtful_failure_says_that_it_is_repeated() -> None:
    trial = sample.gpu_trial(4, 24, fits=False)
    doubt = replace(trial.evidence, rule="cuDNN internal", doubtful=True)
    first = replace(trial, evidence=doubt, demand_bytes=None)
    again = replace(first, spec=replace(trial.spec, index=5, repeats=4))

    assert ": cuDNN internal, doubtful, so it is repeated before it counts" in (
        words.trial_line(first)
    )
    assert ": cuDNN internal, repeating trial 4" in words.trial_line(again)


def test_a_line_of_progress_on_a_cpu_does_not_say_virtual() -> None:
    assert "virtual" not in words.trial_line(sample.cpu_trial(1, 32, 2**30))


def test_every_verdict_has_words() -> None:
    assert set(words.VERDICTS) == set(Verdict)


def test_nothing_measured_is_never_zero() -> None:
    assert {words.size(None), words.exact(None), words.count(None), words.duration(None)} == {
        "not measured"
    }
    assert words.size(0) == "0 B"


def test_only_the_whole_is_a_hundred_per_cent() -> None:
    assert words.share(2, 2) == "100.0 %"
    assert words.share(999_999, 1_000_000) == "99.99 %"
    assert words.share(1, 3) == "33.3 %"


def test_a_sentence_begins_with_a_capital_unless_it_begins_with_a_name() -> None:
    assert words.sentence("kernels ran") == "Kernels ran."
    assert words.sentence("cuDNN ran.") == "cuDNN ran."
    assert words.sentence("") == ""


def test_words_import_nothing_heavy() -> None:
    code = (
        "import sys, memfit.report.words, memfit.cli.answer;"
        "print([m for m in ('torch', 'matplotlib', 'pandas', 'jinja2') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
