"""The memory that tensors of any kind stand on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def parts_of(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensors with memory of their own that a tensor consists of.

    A sparse tensor consists of indices and values, and one that wraps others (a DTensor, a
    quantised weight) of those; any other is its own and only part.
    """
    import torch  # noqa: PLC0415

    if tensor.layout is torch.sparse_coo:
        yield tensor._indices()  # noqa: SLF001
        yield tensor._values()  # noqa: SLF001
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        yield from (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        yield from (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
    elif hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield from parts_of(getattr(tensor, name))
    else:
        yield tensor
