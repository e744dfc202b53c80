"""The ledger of real trials: it sums to the measured peak, and says what every block is."""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from memfit import virtual
from memfit.records import DeviceKind, DeviceSpec, Precision, Split, TrialSpec, Verdict
from memfit.trial.ledger_recorder import LedgerRecorder
from memfit.trial.runner import TrialRunner
from memfit.units import GIB

pytestmark = pytest.mark.virtual
ROOT = Path(__file__).parents[2]
CARD = virtual.find_card("rtx-4090")
DEVICE = DeviceSpec(
    kind=DeviceKind.VIRTUAL,
    slug=CARD.slug,
    name=CARD.name,
    total_bytes=CARD.total_bytes,
    limit_bytes=CARD.total_bytes,
    context_bytes=virtual.context_charge(CARD)[0],
)


def spec(microbatch=4, steps=2, **changes):
    return TrialSpec(
        index=1,
        purpose="confirm",
        split=Split(microbatch=microbatch, accumulation_steps=steps, replicas=1),
        group_microbatches=steps,
        device=DEVICE,
        timeout_s=300.0,
        **changes,
    )


@contextlib.contextmanager
def opened(target, variables=None, **parameters):
    environment = virtual.prepare(CARD, total_bytes=CARD.total_bytes)
    with TrialRunner(
        str(target),
        parameters,
        environment={**environment, **(variables or {})},
        load_timeout_s=300,
    ) as runner:
        runner.open()
        yield runner


def pair(runner, asked):
    """Run a trial as it is measured, and once more with its ledger."""
    measured = runner.run(asked)
    assert measured.verdict is Verdict.FITS, measured.evidence
    noted = runner.run(replace(asked, groups=measured.groups_run, record_ledger=True))
    assert noted.ledger is not None, noted.evidence
    return measured, noted


def figures(trial):
    return [
        (p.phase, p.groups, p.peak_allocated_bytes, p.peak_reserved_bytes, p.device_used_bytes)
        for p in trial.devices[0].phases
    ]


def by_category(ledger):
    sums: Counter[str] = Counter()
    for row in ledger.rows:
        sums[row.category] += row.bytes[ledger.highest]
    return sums


def assert_sums(measured, noted):
    """The rows of every peak sum to it, and the peaks are those of the measured trial."""
    ledger = noted.ledger
    for index, peak in enumerate(ledger.peaks):
        assert sum(row.bytes[index] for row in ledger.rows) == peak.allocated_bytes
        assert peak.allocated_bytes == max(
            p.peak_allocated_bytes for p in measured.devices[0].phases if p.phase == peak.phase
        )
    assert ledger.peaks[ledger.highest].allocated_bytes == measured.peak_allocated_bytes
    assert figures(measured) == figures(noted)


@pytest.mark.parametrize(
    ("example", "precision", "parameters"),
    [
        ("gpt2", Precision.BF16, {"seq_len": "256"}),
        ("resnet50", Precision.FP16, {}),
        ("mlp", Precision.FP32, {}),
    ],
)
def test_category_and_place_sum_to_the_peak_of_each_example_to_the_byte(
    example, precision, parameters
):
    with opened(ROOT / "examples" / f"{example}.py", **parameters) as runner:
        measured, noted = pair(runner, spec(precision=precision, clip_norm=1.0))

    assert_sums(measured, noted)
    sums = by_category(noted.ledger)
    assert sums["other"] == 0
    assert sums["gradients"] == sums["parameters"]


@pytest.mark.parametrize(
    "setting",
    ["expandable_segments:True", "max_split_size_mb:21,roundup_power2_divisions:4"],
)
def test_it_sums_under_every_setting_of_the_allocator(setting):
    variables = {"PYTORCH_CUDA_ALLOC_CONF": setting, "PYTORCH_ALLOC_CONF": setting}
    with opened(ROOT / "examples" / "resnet50.py", variables) as runner:
        assert_sums(*pair(runner, spec(microbatch=5, steps=1)))


@pytest.fixture(scope="module")
def places():
    with opened(ROOT / "tests" / "workloads" / "places.py") as runner:
        yield runner


def lines(text):
    """Numbers of the lines of the workload that hold this text."""
    source = (ROOT / "tests" / "workloads" / "places.py").read_text().splitlines()
    return {number for number, line in enumerate(source, start=1) if text in line}


def rows(ledger, category, text, phase="backward"):
    index = [p.phase for p in ledger.peaks].index(phase)
    found = [
        row
        for row in ledger.rows
        if row.category == category
        and row.place
        and int(row.place.rpartition(":")[2]) in lines(text)
    ]
    return {row.module: row.bytes[index] for row in found if row.bytes[index]}


def test_parameters_are_told_by_module_and_by_the_line_that_made_them(places):
    _, noted = pair(places, spec())

    assert rows(noted.ledger, "parameters", "self.up = ").keys() == {"blocks.[0-2].up"}
    assert rows(noted.ledger, "parameters", "self.scale = ") == {"": 512}
    assert rows(noted.ledger, "buffers", "register_buffer") == {"": 4096}


def test_optimizer_state_is_told_by_module_and_by_the_line_that_made_the_optimizer(places):
    _, noted = pair(places, spec())
    state = rows(noted.ledger, "optimizer state", "torch.optim.AdamW(")

    assert state["blocks.[0-2].up"] == 2 * sum(
        rows(noted.ledger, "parameters", "self.up = ").values()
    )


def test_gradients_have_the_module_and_the_line_of_their_parameters_forward(places):
    _, noted = pair(places, spec())

    assert "blocks.[0-2].up" in rows(
        noted.ledger, "gradients", "hidden = self.up(x)", phase="optimizer_step"
    )


def test_activations_are_told_by_the_module_and_the_line_that_made_them(places):
    _, noted = pair(places, spec())

    assert rows(noted.ledger, "activations", "hidden = self.up(x)", "forward").keys() == {
        "blocks.[0-2].up"
    }
    assert rows(noted.ledger, "activations", "F.gelu(hidden)", "forward").keys() == {"blocks.[0-2]"}
    assert rows(noted.ledger, "inputs", "torch.randn(m").keys() == {""}


def test_what_backward_allocates_has_the_line_of_its_forward(places):
    _, noted = pair(places, spec())

    assert rows(noted.ledger, "temporary", "self.down(hidden)").keys() == {"blocks.2.down"}


@pytest.mark.parametrize("microbatch", [5, 6], ids=["reentrant", "not reentrant"])
def test_a_checkpoint_keeps_no_activation_in_forward(places, microbatch):
    measured, noted = pair(places, spec(microbatch))

    assert_sums(measured, noted)
    assert rows(noted.ledger, "activations", "hidden = self.up(x)", "forward") == {}


def test_what_a_checkpoint_computes_again_is_an_activation(places):
    _, noted = pair(places, spec(5))

    # The peak of backward is where the last block was computed again.
    assert rows(noted.ledger, "activations", "hidden = self.up(x)").keys() == {"blocks.2.up"}


def test_replicas_sum_too(places):
    asked = spec()
    split = replace(asked.split, replicas=2)

    assert_sums(*pair(places, replace(asked, split=split)))


def test_what_reads_unknown_values_sums_too(places):
    assert_sums(*pair(places, spec(7)))


def test_a_trial_that_survives_refused_requests_sums_too():
    """CuDNN's larger workspaces are refused where memory is short, and smaller ones are taken."""
    tight = replace(DEVICE, limit_bytes=3 * GIB)
    asked = replace(spec(51, groups=3), device=tight, precision=Precision.BF16)
    with opened(ROOT / "examples/resnet50.py") as runner:
        roomy = runner.run(spec(1, precision=Precision.BF16))
        if any("not plan for a device" in limit for limit in roomy.limits):
            pytest.skip("this cuDNN cannot plan for a described device")
        measured, noted = pair(runner, asked)

    assert any(p.alloc_retries for p in measured.devices[0].phases)
    assert_sums(measured, noted)


def test_what_is_compiled_sums_too():
    pytest.importorskip("triton")
    with opened("tests.benchmarks.workloads.compiled:Compiled", length="1024") as runner:
        runner.run(spec(1))  # compiles; what is asked of the device then is another matter
        measured, noted = pair(runner, spec(1))

    assert_sums(measured, noted)


def test_the_cpu_has_no_ledger():
    reader = SimpleNamespace(device=SimpleNamespace(type="cpu"))

    assert LedgerRecorder.start(reader) is None
