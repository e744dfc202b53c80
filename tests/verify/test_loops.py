"""Loops as people write them: one that is right, and broken ones, each found under one code."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from memfit.errors import UsageError
from memfit.verify.worker.loops import find_loop, watch_groups
from tests.verify.checking import line_of, watch, write

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step")

LOOP = """\
torch.manual_seed(0)
model = nn.Linear(16, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
A = 4
data = [(torch.randn(8, 16), torch.randn(8, 1)) for _ in range(12)]
for i, (x, y) in enumerate(data):
    loss = F.mse_loss(model(x), y) / A
    loss.backward()
    if (i + 1) % A == 0:
        optimizer.step()
        optimizer.zero_grad()
"""

SCALED = """\
torch.manual_seed(0)
model = nn.Linear(16, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
A = 4
data = [(torch.randn(8, 16), torch.randn(8, 1)) for _ in range(12)]
for i, (x, y) in enumerate(data):
    loss = F.mse_loss(model(x), y) / A
    scaler.scale(loss).backward()
    if (i + 1) % A == 0:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
"""

SCHEDULED = LOOP.replace(
    "A = 4\n", "A = 4\nschedule = torch.optim.lr_scheduler.StepLR(optimizer, 10)\n"
).replace(
    "        optimizer.zero_grad()\n", "        schedule.step()\n        optimizer.zero_grad()\n"
)

TOKENS = """\
torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 11))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
A = 2
lengths = [2, 8, 3, 5, 1, 9]
data = []
for length in lengths:
    labels = torch.full((4, 9), -100)
    labels[:, :length] = torch.randint(11, (4, length))
    data.append((torch.randint(11, (4, 9)), labels))
for i in range(0, 6, A):
    group = data[i : i + A]
    N = sum(int((labels != -100).sum()) for _, labels in group)
    for ids, labels in group:
        n = int((labels != -100).sum())
        loss = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten())
        (loss * n / N).backward()
    optimizer.step()
    optimizer.zero_grad()
"""

PARALLEL = """\
import contextlib
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
A = 4
data = [(torch.randn(8, 16), torch.randn(8, 1)) for _ in range(12)]
for i, (x, y) in enumerate(data):
    last = (i + 1) % A == 0
    with contextlib.nullcontext() if last else model.no_sync():
        loss = F.mse_loss(model(x), y) / A
        loss.backward()
    if last:
        optimizer.step()
        optimizer.zero_grad()
dist.destroy_process_group()
"""

RIGHT = {
    "plain": LOOP,
    "scaled": SCALED,
    "scheduled": SCHEDULED,
    "tokens": TOKENS,
    "sums": TOKENS.replace("labels.flatten())\n", "labels.flatten(), reduction='sum')\n").replace(
        "loss * n / N", "loss / N"
    ),
    "parallel": PARALLEL,
    "without accumulation": LOOP.replace("A = 4", "A = 1"),
    "logged": LOOP.replace("A = 4", "A, total = 4, 0.0").replace(
        "    loss.backward()\n", "    loss.backward()\n    total += loss.item()\n"
    ),
    "evaluated": LOOP + "with torch.no_grad():\n    print(model(data[0][0]).mean())\n",
}


@pytest.mark.parametrize("name", sorted(RIGHT))
def test_a_loop_that_is_right_is_clean(name: str, tmp_path: Path) -> None:
    found, seen = watch(tmp_path, RIGHT[name])

    assert [f.code for f in found] == []
    assert seen.group_count == (12 if name == "without accumulation" else 3)
    assert seen.steps_attempted == seen.steps_applied == seen.group_count
    if name != "parallel":
        assert all(g.error is not None and g.error < 1e-6 for g in seen.groups)


STEP = """\
    if (i + 1) % A == 0:
        optimizer.step()
        optimizer.zero_grad()
"""
ALWAYS = """\
    optimizer.step()
    optimizer.zero_grad()
"""

BROKEN = {
    "MF201": (TOKENS.replace("loss * n / N", "loss / A"), "(loss / A).backward()"),
    "MF202": (LOOP.replace("y) / A", "y, reduction='sum')"), "loss.backward()"),
    "MF203": (LOOP.replace("/ A\n", "/ A / A\n"), "loss.backward()"),
    "MF204": (LOOP.replace("/ A\n", "\n"), "loss.backward()"),
    "MF207": (
        LOOP.replace("range(12)", "range(10)").replace("% A == 0", "% A == 0 or i == 9"),
        "optimizer.step()",
    ),
    "MF208": (
        LOOP.replace(
            "A = 4\n",
            "A = 4\nclass Own(torch.autograd.Function):\n"
            "    @staticmethod\n    def forward(ctx, x):\n        return x.mean()\n"
            "    @staticmethod\n    def backward(ctx, g):\n        return g.expand(8, 1) / 8\n",
        ).replace("F.mse_loss(model(x), y)", "Own.apply((model(x) - y) ** 2)"),
        "loss.backward()",
    ),
    "MF209": (
        TOKENS.replace("N = sum(int((labels != -100)", "N = sum(int((labels >= -100)"),
        "(loss * n / N).backward()",
    ),
    "MF501": (
        LOOP.replace("    loss = ", "    optimizer.zero_grad()\n    loss = "),
        "optimizer.zero_grad()",
    ),
    "MF502": (LOOP.replace("        optimizer.zero_grad()\n", ""), "loss.backward()"),
    "MF503": (LOOP.replace(STEP, ALWAYS), "optimizer.step()"),
    "MF504": (
        LOOP.replace(
            "    loss.backward()\n",
            "    loss.backward()\n    nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n",
        ),
        "clip_grad_norm_",
    ),
    "MF505": (SCALED.replace("        scaler.unscale_(optimizer)\n", ""), "clip_grad_norm_"),
    "MF506": (
        SCALED.replace(
            "        scaler.unscale_(optimizer)\n",
            "        scaler.unscale_(optimizer)\n        scaler.unscale_(optimizer)  # again\n",
        ),
        "# again",
    ),
    "MF507": (
        SCALED.replace("        scaler.update()\n", "")
        .replace("    if (i", "    if (i + 1) % A:\n        scaler.update(512.0)\n    if (i")
        .replace(
            "        scaler.step(optimizer)\n",
            "        scaler.step(optimizer)\n        scaler.update()\n",
        ),
        "scaler.update(512.0)",
    ),
    "MF508": (
        SCHEDULED.replace("        schedule.step()\n", "").replace(
            "    loss.backward()\n", "    loss.backward()\n    schedule.step()\n"
        ),
        "schedule.step()",
    ),
    "MF509": (
        LOOP.replace("A = 4", "A, total = 4, 0.0").replace(
            "    loss.backward()\n", "    loss.backward()\n    total += loss\n"
        ),
        "loss.backward()",
    ),
    "MF510": (
        PARALLEL.replace(
            "    with contextlib", "    loss = F.mse_loss(model(x), y) / A\n    with contextlib"
        ).replace("        loss = F.mse_loss(model(x), y) / A\n", ""),
        "loss.backward()",
    ),
    "MF511": (LOOP.replace("range(12)", "range(10)"), "loss.backward()"),
    "MF512": (
        SCHEDULED.replace("        schedule.step()\n", "").replace(
            "        optimizer.step()\n", "        schedule.step()\n        optimizer.step()\n"
        ),
        "schedule.step()",
    ),
    "MF602": (
        SCALED.replace("init_scale=1024.0", "init_scale=3e38").replace(
            "torch.randn(8, 1)", "100 * torch.randn(8, 1)"
        ),
        "scaler.step(optimizer)",
    ),
    "MF604": (LOOP, "optimizer.step()"),
    "MF704": (
        PARALLEL.replace("contextlib.nullcontext() if last else ", ""),
        "loss.backward()",
    ),
}


NAMED = {"MF604": 48}
"""Logical batches that are named; the loops' own is 32."""


@pytest.mark.parametrize("code", sorted(BROKEN))
def test_a_broken_loop_is_found_with_its_place_and_nothing_else(code: str, tmp_path: Path) -> None:
    source, at = BROKEN[code]
    found, _ = watch(tmp_path, source, logical_batch=NAMED.get(code))

    assert [f.code for f in found] == [code]
    place = found[0].place
    assert place is not None
    assert "train_" in place.file
    assert place.line == line_of(source, at)


def test_microbatches_of_8_8_8_5_that_are_not_weighted_are_found(tmp_path: Path) -> None:
    sizes = "torch.randn(n, 16), torch.randn(n, 1)) for n in (8, 8, 8, 5) * 3]"
    source = LOOP.replace("torch.randn(8, 16), torch.randn(8, 1)) for _ in range(12)]", sizes)
    found, seen = watch(tmp_path, source)

    assert [f.code for f in found] == ["MF201"]
    assert "8, 8, 8, 5" in found[0].evidence
    assert all(g.error is not None and g.error > 1e-3 for g in seen.groups)

    weighted = source.replace("y) / A", "y) * len(x) / 29")
    found, seen = watch(tmp_path, weighted)
    assert found == []
    assert all(g.error is not None and g.error < 1e-6 for g in seen.groups)


GROUPS = """
class Trainer:
    def __init__(self):
        torch.manual_seed(0)
        self.model = nn.Linear(16, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def run_group(self, m, A):
        for _ in range(A):
            loss = F.mse_loss(self.model(torch.randn(m, 16)), torch.randn(m, 1))
            (loss / A).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("source", "codes"),
    [
        (GROUPS, []),
        (GROUPS.replace("(loss / A)", "loss"), ["MF204"]),
        (GROUPS.replace("        self.optimizer.zero_grad()\n", ""), ["MF502"]),
        (GROUPS.replace("        self.optimizer.", "            self.optimizer."), ["MF503"]),
        (GROUPS + "\ntrainer = Trainer()\n", []),
    ],
)
def test_an_object_with_run_group_is_asked_for_groups_and_watched(
    source: str, codes: list[str], tmp_path: Path
) -> None:
    run_group = find_loop(str(write(tmp_path, source)))
    found, seen = watch_groups(run_group, 2, 4, seed=0, seconds=60.0, target="it")

    assert [f.code for f in found] == codes
    assert seen.backward_passes == 12


def test_a_logical_batch_that_is_the_one_named_is_clean(tmp_path: Path) -> None:
    assert watch(tmp_path, LOOP, logical_batch=32)[0] == []

    # Sequences whose examples lie along the second dimension.
    source = LOOP.replace("model(x)", "model(x.T.unsqueeze(2).expand(-1, -1, 16)).mean(0)")
    assert watch(tmp_path, source, logical_batch=32)[0] == []


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import time\ntime.sleep(600)\n", "no backward pass was seen in .* within 1 s"),
        (
            "model = nn.Linear(2, 1)\nwhile True:\n    model(torch.ones(1, 2)).sum().backward()\n",
            "no optimizer step was seen in .* within 1 s",
        ),
        ("nn.Linear(2, 1)(torch.ones(1, 2)).sum().backward()\n", "no optimizer step was seen"),
    ],
)
def test_a_program_in_which_no_group_ends_is_ended_and_told(
    source: str, said: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=said):
        watch(tmp_path, source, seconds=1.0)


def test_a_loop_without_an_end_is_watched_for_a_while(tmp_path: Path) -> None:
    found, seen = watch(
        tmp_path, LOOP.replace("enumerate(data)", "enumerate(data * 10**6)"), seconds=3.0
    )
    assert found == []
    assert seen.ended == "time"


def test_a_graph_that_is_retained_is_found(tmp_path: Path) -> None:
    found, _ = watch(tmp_path, LOOP.replace("backward()", "backward(retain_graph=True)"))
    assert [f.code for f in found] == ["MF509"]


def test_a_step_after_each_microbatch_is_found_where_the_steps_are_named(tmp_path: Path) -> None:
    source = LOOP.replace("A = 4", "A = 1")
    found, _ = watch(tmp_path, source, steps=4)
    assert [f.code for f in found] == ["MF503"]
