"""Several processes, and several simulated ranks in one."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.compatibility.catalogue import item
from tests.compatibility.training import CARD, random, train

PARALLEL = "Several ranks"


def _layers() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))


def _pretend(ranks: int) -> None:
    """Become rank 0 of a group in which nobody else takes part."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)


def _join() -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")


def _loss(model: nn.Module) -> Callable[[], torch.Tensor]:
    return lambda: model(random(16, 512)).square().mean()


@item(PARALLEL, "DDP, 2 processes over NCCL", devices=2, ranks=2)
def ddp() -> None:
    """torchrun; accumulation under no_sync, bf16 compression hook, static graph."""
    _join()
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

    device = torch.cuda.current_device()
    model = DistributedDataParallel(_layers().to(CARD), device_ids=[device])
    train(model, _loss(model))
    with model.no_sync():
        model(random(16, 512)).sum().backward()
    model(random(16, 512)).sum().backward()
    other = DistributedDataParallel(
        _layers().to(CARD), device_ids=[device], gradient_as_bucket_view=True, static_graph=True
    )
    other.register_comm_hook(None, bf16_compress_hook)
    train(other, _loss(other))
    dist.barrier()
    dist.destroy_process_group()


@item(PARALLEL, "DDP with ZeroRedundancyOptimizer, 2 processes", devices=2, ranks=2)
def zero() -> None:
    """torchrun; optimizer states shared out over the ranks; SyncBatchNorm."""
    _join()
    from torch.distributed.optim import ZeroRedundancyOptimizer

    device = torch.cuda.current_device()
    inner = nn.Sequential(nn.Linear(512, 512), nn.BatchNorm1d(512), nn.Linear(512, 512)).to(CARD)
    inner = nn.SyncBatchNorm.convert_sync_batchnorm(inner)
    model = DistributedDataParallel(inner, device_ids=[device])
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
    for _ in range(2):
        model(random(16, 512)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


@item(PARALLEL, "FSDP2, 2 processes over NCCL", devices=2, ranks=2)
def fsdp_processes() -> None:
    """torchrun; fully_shard on each layer, mixed precision, gradients clipped."""
    _join()
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = _layers().to(CARD)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    train(model, _loss(model))
    model(random(16, 512)).sum().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    dist.destroy_process_group()


@item(PARALLEL, "collectives, 2 processes over NCCL", devices=2, ranks=2)
def collectives() -> None:
    """torchrun; every collective of torch.distributed, send and receive, a subgroup."""
    _join()
    x = torch.ones(8, device=CARD)
    dist.all_reduce(x)
    dist.broadcast(x, 0)
    dist.reduce(x, 0)
    dist.all_gather([torch.empty_like(x) for _ in range(2)], x)
    dist.all_gather_into_tensor(torch.empty(16, device=CARD), x)
    dist.reduce_scatter_tensor(torch.empty(4, device=CARD), x)
    dist.all_to_all_single(torch.empty_like(x), x)
    dist.barrier()
    if dist.get_rank() == 0:
        dist.send(x, 1)
    else:
        dist.recv(x, 0)
    part: Any = dist.new_group([0, 1])
    dist.all_reduce(x, group=part)
    dist.destroy_process_group()


@item(PARALLEL, "objects, 2 processes over NCCL", devices=2, ranks=2)
def objects() -> None:
    """torchrun; objects of other sizes on each rank, gathered, broadcast and scattered."""
    _join()
    rank, mine = dist.get_rank(), {"rank": dist.get_rank(), "words": ["word"] * dist.get_rank()}
    parts: list[Any] = [None, None]
    dist.all_gather_object(parts, mine)
    assert parts == [{"rank": 0, "words": []}, {"rank": 1, "words": ["word"]}], parts
    news: list[Any] = ["news", rank] if rank == 1 else [None, None]
    dist.broadcast_object_list(news, src=1)
    assert news == ["news", 1], news
    part: list[Any] = [None]
    dist.scatter_object_list(part, ["zero", "the first"] if rank == 0 else None, src=0)
    assert part == [["zero", "the first"][rank]], part
    total = torch.tensor([rank + 1.0], device=CARD)
    dist.all_reduce(total)
    assert total.item() == 3, total
    dist.destroy_process_group()


@item(PARALLEL, "FSDP2 over 8 simulated ranks")
def fsdp_fake() -> str:
    """Fake process group; fully_shard, AdamW, states are an eighth of the weights."""
    _pretend(8)
    from torch.distributed.fsdp import fully_shard

    model = _layers().to(CARD)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, _loss(model), optimizer=optimizer)
    shards = [s["exp_avg"].to_local().numel() for s in optimizer.state.values()]
    assert sum(shards) == 4 * (512 * 512 + 512) // 8, shards
    return "states are an eighth"


@item(PARALLEL, "FSDP1 over 4 simulated ranks")
def fsdp_one() -> None:
    """Fake process group; FullyShardedDataParallel with mixed precision."""
    _pretend(4)
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision

    policy = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    model = FullyShardedDataParallel(
        _layers().to(CARD), device_id=torch.cuda.current_device(), mixed_precision=policy
    )
    train(model, _loss(model))


@item(PARALLEL, "tensor parallel over 4 simulated ranks")
def tensor_parallel() -> None:
    """Fake process group; parallelize_module by columns and rows, DTensor gradients."""
    _pretend(4)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cuda", (4,))
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    model = parallelize_module(_layers()[:2].to(CARD), mesh, plan)
    assert isinstance(model, nn.Module)
    train(model, _loss(model))
