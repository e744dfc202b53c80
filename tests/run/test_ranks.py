"""Several ranks: what each holds is what theory says."""

from __future__ import annotations

import pytest

from tests.run.conftest import Desk
from tests.run.test_peaks import MIB, only, phases

pytestmark = pytest.mark.virtual

LAYERS = 4
LAYER = 2048 * 2048 * 4
"""Bytes of one layer: 16 MiB, which the allocator hands out to the byte."""
ACTIVATION = 8 * 2048 * 4
SCALARS = 2 * 512
"""The loss and its gradient, in the allocator's smallest blocks."""
WORKSPACES = 2 * (2 * 4096 + 8 * 16) * 1024
"""cuBLAS's, one for forward's thread and one for backward's: PyTorch's :4096:2:16:8."""

DDP = f"""
    import os, torch, torch.distributed as dist
    from torch import nn
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    dist.init_process_group("nccl")
    model = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range({LAYERS}))).cuda()
    model = nn.parallel.DistributedDataParallel(model, device_ids=[local])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    for group in range(3):
        model(torch.randn(8, 2048, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    dist.destroy_process_group()
"""


def test_two_ranks_of_ddp_under_torchrun_agree_with_theory(desk: Desk) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    document = desk.told(DDP, "--devices", "2", launcher=launcher)

    assert document["exit_status"] == 0
    assert [process["rank"] for process in document["processes"]] == [0, 1]
    parameters = gradients = buckets = momentum = LAYERS * LAYER
    for process in document["processes"]:
        assert (process["world_size"], process["optimizer_steps"]) == (2, 3)
        assert process["program"] == ["train.py"]
        assert [device["device"] for device in process["devices"]] == [process["rank"]]
        seen = phases(process)
        before = parameters + gradients + buckets + WORKSPACES
        # Beside the loss, nothing of forward and backward is left at the first optimizer step.
        assert seen["first_step_begins"]["allocated_bytes"] - before in (0, 512, SCALARS)
        assert seen["first_step_ends"]["allocated_bytes"] - before - momentum in (0, 512, SCALARS)
        # The peak is in a later backward: one layer's new gradient beside all that stays, four
        # inputs that forward saved, and the gradients at both sides of that layer.
        peak = before + momentum + LAYER + (LAYERS + 2) * ACTIVATION + SCALARS
        assert seen["end"]["peak_allocated_bytes"] == peak
    assert any("Ranks exchange values of up to 64 KiB" in limit for limit in document["limits"])


FSDP = f"""
    import torch, torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore
    dist.init_process_group("fake", store=FakeStore(), rank=7, world_size=8)
    mesh = init_device_mesh("cuda", (8,))
    def sharded(rows):
        with torch.device("meta"):
            layers = [nn.Linear(2048, rows, bias=False) for _ in range({LAYERS})]
        model = nn.Sequential(*layers)
        for layer in layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model.to_empty(device="cuda")
    model = sharded(2048)
    print(*(p.to_local().shape[0] for p in model.parameters()), torch.cuda.memory_allocated())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    for _ in range(3):
        model(torch.randn(8, 2048, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    before = torch.cuda.memory_allocated()
    padded = sharded(2044)
    print(*(p.to_local().shape[0] for p in padded.parameters()))
    print(torch.cuda.memory_allocated() - before)
"""


def test_fsdp2_over_eight_simulated_ranks_agrees_with_theory(desk: Desk) -> None:
    ended = desk.run(FSDP, "--json")
    shard = LAYER // 8
    # 2,044 rows over 8 ranks: ceil(2044 / 8) = 256 each, padded on the last rank, which has 252.
    assert ended.err.splitlines()[:3] == [
        f"256 256 256 256 {LAYERS * shard}",
        "252 252 252 252",
        f"{LAYERS * shard}",
    ]
    process = only(ended.told)
    assert (process["rank"], process["world_size"]) == (7, 8)
    seen = phases(process)
    parameters = gradients = momentum = LAYERS * shard
    resident = parameters + gradients + momentum + WORKSPACES
    assert seen["first_step_ends"]["allocated_bytes"] - resident in (0, 512, SCALARS)
    # In backward, whole layers: the one at work and the next, both gathered, the one's gradient,
    # and the one before it as the input of its reduce-scatter. The third layer is the first with
    # all four, and its forward saved three inputs.
    peak = resident + 4 * LAYER + 5 * ACTIVATION + SCALARS
    assert seen["end"]["peak_allocated_bytes"] == peak
    # Nothing is whole for long: all layers gathered at once would be more.
    assert peak < resident + 2 * LAYERS * LAYER
    assert peak < 128 * MIB
