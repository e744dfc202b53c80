"""Kinds of training code that once broke, or easily would: the quick items of the table."""

from __future__ import annotations

import importlib.metadata
import json

import pytest

from tests.compatibility.catalogue import items

pytestmark = pytest.mark.virtual

DEVICES = {"data_parallel": 2, "split": 2, "one_process": 2}


BARE_FROM = {"defaults": (2, 14)}
"""Items that an older torch runs only with values beside them: its AdamW divides by what it reads
of a step counter on the card."""


def run(nursery, key, **options):
    """Run an item of the table, and return the functions whose results were invented."""
    release = tuple(map(int, importlib.metadata.version("torch").split(".")[:2]))
    values = release < BARE_FROM.get(key, release)
    script = f"""
        import json
        from memfit.virtual import control
        from tests.compatibility.catalogue import Absent, items
        if {values}:
            from memfit.virtual.values import ValueMode
            ValueMode(share=1.0, note=lambda _: None).__enter__()
        try:
            items()[{key!r}].run()
        except Absent:
            pass
        print(json.dumps(control.unknown_names()))
    """
    output = nursery.run(script, card="h100-80gb", devices=DEVICES.get(key, 1), **options)
    return json.loads(output.splitlines()[-1])


@pytest.mark.parametrize(
    "key",
    [
        "lstm",  # sizes of cuDNN's RNN workspaces that were never written
        "convolutions",
        "ctc",
        "fft",  # cuFFT's sizes of plans
        "linalg",  # cuSOLVER's sizes of buffers, and functions that NVRTC compiles
        "sparse",
        "repeats",  # a kernel wrapper that reads counts from the device
        "int8",
        "fp8",
        "checkpointing",
        "offload",
        "math",
        "captured",
        "callables",
        "streams",
        "generators",
        "saving",
        "defaults",  # counters on the card, by which AdamW divides
        "data_parallel",
        "split",
        "one_process",
        "snapshot",
        "profiler",  # CUPTI
        "nvml",
    ],
)
def test_it_trains(nursery, key):
    run(nursery, key)


@pytest.mark.parametrize("key", ["encoder", "resnet_nchw", "segmentation", "data_parallel"])
def test_a_models_step_invents_nothing(nursery, key):
    assert run(nursery, key) == []


def test_every_item_says_what_runs():
    assert all(item.what and item.area for item in items().values())
