"""Peers of a replica that are not there: every other rank is taken to be a copy of this one.

A trial of `D` replicas runs one of them. The data-parallel wrapper is the real one, with its real
buffers; its collectives answer at once, as if all ranks held this rank's tensors. What the
communication library itself would allocate is not there.
"""

# mypy: disable-error-code="override, assignment, attr-defined, call-arg"
# The base class declares each collective twice, for C++ and for Python; these serve both.

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future
from torch.futures import Future

_BACKEND = "memfit_copies"


@contextlib.contextmanager
def copies(replicas: int) -> Iterator[None]:
    """Make this process replica 0 of `replicas` while the context lasts."""
    if _BACKEND.upper() not in dist.Backend._plugins:  # noqa: SLF001
        dist.Backend.register_backend(_BACKEND, _create, devices=["cpu", "cuda"])
    dist.init_process_group(_BACKEND, store=dist.HashStore(), rank=0, world_size=replicas)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _create(store: Any, rank: int, size: int, timeout: Any) -> dist.ProcessGroup:  # noqa: ARG001
    return _Copies(rank, size)


def _done(value: Any) -> Any:
    """Return a collective that has already ended with this value."""
    future: Future[Any] = Future()
    future.set_result(value)
    return _create_work_from_future(future)


class _Copies(dist.ProcessGroup):
    """A process group in which all ranks are copies of this one."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._size = size

    def size(self) -> int:
        return self._size

    def getBackendName(self) -> str:  # noqa: N802 - torch calls it by this name
        return _BACKEND

    @property
    def group_name(self) -> str:
        # A group made in Python gets no name of its own from torch's C++ side.
        return str(dist.distributed_c10d._world.pg_names[self])  # noqa: SLF001

    def _reduce(self, tensor: torch.Tensor, opts: Any) -> None:
        """Reduce with copies of the tensor; all but sum and product leave it as it is."""
        operation = getattr(opts, "reduceOp", dist.ReduceOp.SUM)
        if operation == dist.ReduceOp.SUM:
            tensor.detach().mul_(self._size)
        elif operation == dist.ReduceOp.PRODUCT:
            tensor.detach().pow_(self._size)

    def allreduce(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> Any:
        for tensor in tensors:
            self._reduce(tensor, opts)
        return _done(tensors)

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> Any:  # noqa: ARG002
        return _done(tensors)

    def barrier(self, opts: Any = None) -> Any:  # noqa: ARG002
        return _done([])

    def allgather(
        self,
        outputs: Sequence[Sequence[torch.Tensor]],
        inputs: Sequence[torch.Tensor],
        opts: Any = None,  # noqa: ARG002
    ) -> Any:
        for row, tensor in zip(outputs, inputs, strict=True):
            for output in row:
                output.detach().copy_(tensor)
        return _done(outputs)

    def _allgather_base(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        opts: Any = None,  # noqa: ARG002
    ) -> Any:
        for part in output.detach().view(self._size, -1):
            part.copy_(tensor.reshape(-1))
        return _done(output)

    all_gather_single = _allgather_base

    def allgather_into_tensor_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> Any:
        for output, tensor in zip(outputs, inputs, strict=True):
            self._allgather_base(output, tensor, opts)
        return _done(outputs)

    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def _reduce_scatter_base(
        self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None
    ) -> Any:
        output.detach().view(-1).copy_(tensor.reshape(self._size, -1)[0])
        self._reduce(output, opts)
        return _done(output)

    reduce_scatter_single = _reduce_scatter_base

    def reduce_scatter(
        self,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[Sequence[torch.Tensor]],
        opts: Any = None,
    ) -> Any:
        for output, row in zip(outputs, inputs, strict=True):
            output.detach().copy_(row[0])
            self._reduce(output, opts)
        return _done(outputs)

    def reduce_scatter_tensor_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> Any:
        for output, tensor in zip(outputs, inputs, strict=True):
            self._reduce_scatter_base(output, tensor, opts)
        return _done(outputs)

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def alltoall(
        self,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        opts: Any = None,  # noqa: ARG002
    ) -> Any:
        for output in outputs:
            output.detach().copy_(inputs[0])
        return _done(outputs)
