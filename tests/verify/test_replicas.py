"""Real data-parallel processes over gloo, started by torchrun."""

from __future__ import annotations

import itertools
import os
import textwrap
from typing import TYPE_CHECKING

import pytest

from memfit.verification import Outcome
from memfit.verify.run import VerifyRequest, run_verify
from tests.verify.checking import HEAD, line_of
from tests.verify.test_workloads import COUNT, REFERENCE, TOKENS

if TYPE_CHECKING:
    from pathlib import Path

    from memfit.verification import Verification

_numbers = itertools.count()

whole = pytest.mark.skipif(
    "MEMFIT_TEST_ALL" not in os.environ,
    reason="starts many processes; the same rules are tested by tables (MEMFIT_TEST_ALL=1 runs it)",
)


def verify(folder: Path, source: str, *, replicas: int, script: bool = False) -> Verification:
    path = folder / f"replicas_{next(_numbers)}.py"
    path.write_text(HEAD + textwrap.dedent(source))
    request = VerifyRequest(target=str(path), replicas=replicas, script=script)
    return run_verify(request, lambda _: None)


@pytest.mark.parametrize("replicas", [2, 3])
def test_replicas_are_equal_with_the_factor_and_off_by_it_without(
    replicas: int, tmp_path: Path
) -> None:
    made = verify(tmp_path, TOKENS + COUNT, replicas=replicas)

    assert made.outcome is Outcome.EQUAL
    check = made.replicas
    assert check is not None
    assert len(set(check.counts)) == 2
    assert check.error <= check.tolerance < 1e-9
    assert check.ratio_without == pytest.approx(1 / replicas, rel=1e-9)
    assert check.error_mean_of_means > 0.01


@whole
def test_a_wrapper_that_adds_up_where_the_mean_is_meant_is_found(tmp_path: Path) -> None:
    source = (
        REFERENCE
        + """
def parallelize(model, mesh):
    from torch.nn.parallel import DistributedDataParallel
    made = DistributedDataParallel(model, process_group=mesh.get_group())
    def add_up(state, bucket):
        return torch.distributed.all_reduce(bucket.buffer(), async_op=True).get_future().then(
            lambda done: done.value()[0]
        )
    made.register_comm_hook(None, add_up)
    return made
"""
    )
    made = verify(tmp_path, source, replicas=2)

    assert [f.code for f in made.findings] == ["MF703"]
    assert made.findings[0].place is not None
    assert made.findings[0].place.line == line_of(source, "def parallelize")


LOOP = """
import os
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
rank, D = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 11)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(rank)
for group in range(3):
    ids = torch.randint(11, (4, 9))
    labels = torch.full((4, 9), -100)
    labels[:, : 3 + 4 * rank] = torch.randint(11, (4, 3 + 4 * rank))
    n = torch.tensor(int((labels != -100).sum()))
    N = n.clone()
    dist.all_reduce(N)
    loss = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten())
    loss = loss * float(D * n / N)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""

BROKEN = {
    "MF701": LOOP.replace("manual_seed(rank)", "manual_seed(7)").replace("3 + 4 * rank", "5"),
    "MF702": LOOP.replace("    loss = loss * float(D * n / N)\n", ""),
    "MF703": LOOP.replace("D * n / N", "n / N"),
    "MF704": LOOP.replace("model(ids)", "model.module(ids)"),
}


@whole
def test_a_data_parallel_loop_that_is_right_is_clean(tmp_path: Path) -> None:
    made = verify(tmp_path, LOOP, script=True, replicas=2)

    assert [f.code for f in made.findings] == []
    assert made.outcome is Outcome.EQUAL


@whole
@pytest.mark.parametrize("code", sorted(BROKEN))
def test_a_broken_data_parallel_loop_is_found_with_its_place(code: str, tmp_path: Path) -> None:
    made = verify(tmp_path, BROKEN[code], script=True, replicas=2)

    assert [f.code for f in made.findings] == [code]
    place = made.findings[0].place
    assert place is not None
    assert place.line == line_of(BROKEN[code], "loss.backward()")
