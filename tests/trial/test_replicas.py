"""A replica whose peers are copies of itself, on the CPU."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from memfit.group import run_group
from memfit.trial.replicas import copies

pytestmark = pytest.mark.filterwarnings("ignore")


def model_and_batch():
    torch.manual_seed(0)
    return nn.Linear(16, 4), torch.randn(8, 16)


def test_a_mean_over_copies_is_the_value_itself():
    plain, batch = model_and_batch()
    plain(batch).square().mean().backward()
    model, _ = model_and_batch()
    with copies(4):
        wrapped = DistributedDataParallel(model)
        wrapped(batch).square().mean().backward()

    torch.testing.assert_close(model.weight.grad, plain.weight.grad)


def test_a_group_on_replicas_has_the_gradient_of_equal_shares():
    plain, batch = model_and_batch()
    plain(batch).square().mean().backward()
    model, _ = model_and_batch()
    seen = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: seen.append(model.weight.grad.clone()))
    with copies(4):
        run_group(
            DistributedDataParallel(model),
            optimizer,
            batch.split(2),
            loss=lambda m, b: m(b).square().mean(),
            counts=[2, 2, 2, 2],
            replicas=4,
        )

    torch.testing.assert_close(seen[0], plain.weight.grad)


def test_collectives_answer_as_if_every_rank_held_the_same():
    with copies(3):
        total = torch.ones(2)
        dist.all_reduce(total)
        gathered = [torch.zeros(2) for _ in range(3)]
        dist.all_gather(gathered, torch.tensor([1.0, 2.0]))
        largest = torch.ones(2)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        dist.barrier()

    assert total.tolist() == [3.0, 3.0]
    assert [g.tolist() for g in gathered] == [[1.0, 2.0]] * 3
    assert largest.tolist() == [1.0, 1.0]


def test_a_mesh_spans_the_replicas():
    with copies(3):
        assert init_device_mesh("cpu", (3,)).size() == 3
