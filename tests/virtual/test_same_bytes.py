"""The same question gives the same bytes, run after run, and from one cache to another."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from memfit.devices.select import choose, describe
from memfit.probe import worker_environment
from memfit.records import Split, TrialSpec, Verdict
from memfit.trial.runner import TrialRunner
from memfit.virtual import find_card, prepare

pytestmark = pytest.mark.virtual

RUNS = 20


def peaks(runs):
    """Run a trial many times, and return what each showed of memory."""
    choice = choose("rtx-4090")
    device = describe(choice, memory_limit=None)
    environment = worker_environment(choice, device)
    with TrialRunner("memfit.selftest", {}, environment=environment) as runner:
        runner.open()
        shown = []
        for index in range(1, runs + 1):
            result = runner.run(
                TrialSpec(
                    index=index,
                    purpose="search",
                    split=Split(microbatch=8, accumulation_steps=2),
                    group_microbatches=2,
                    device=device,
                    timeout_s=300,
                )
            )
            assert result.verdict is Verdict.FITS
            shown.append((result.peak_bytes, *map(_without_seconds, result.devices[0].phases)))
        return shown


def _without_seconds(phase):
    return (
        phase.phase,
        phase.groups,
        phase.peak_allocated_bytes,
        phase.peak_reserved_bytes,
        phase.device_used_bytes,
        phase.outside_allocator_bytes,
        phase.alloc_retries,
    )


def test_every_peak_of_every_phase_is_the_same_over_many_runs():
    shown = peaks(RUNS)

    assert len(shown) == RUNS
    assert len(set(shown)) == 1
    assert shown[0][0] > 0


CONVOLUTION = """
import torch
from torch import nn
layers = nn.Conv2d(3, 64, 7), nn.BatchNorm2d(64), nn.ReLU(), nn.Conv2d(64, 64, 3)
model = nn.Sequential(*layers).cuda()
optimizer = torch.optim.AdamW(model.parameters())
x = torch.randn(8, 3, 64, 64, device="cuda")
sizes = []
torch.cuda.memory._record_memory_history()
for _ in range(2):
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
traces = torch.cuda.memory._snapshot()["device_traces"][0]
print([(entry["action"], entry["size"]) for entry in traces])
print(torch.cuda.memory_stats()["allocated_bytes.all.peak"], torch.cuda.max_memory_reserved())
"""


def test_two_caches_give_the_same_bytes(driver_cache, tmp_path, monkeypatch):
    """Two drivers, each built into a cache of its own, are asked for every allocation."""
    card = find_card("rtx-3090")
    said = []
    for cache in (driver_cache, tmp_path):
        monkeypatch.setenv("MEMFIT_CACHE", str(cache))
        variables = prepare(card, total_bytes=card.total_bytes)
        assert str(cache) in variables["LD_PRELOAD"]
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", CONVOLUTION],
            env={**os.environ, **variables},
            check=True,
            capture_output=True,
            text=True,
        )
        said.append(done.stdout)

    assert said[0] == said[1]
    assert said[0].count("alloc") > 20
