"""Values beside a program on the virtual GPU: what small tensors would hold if kernels ran.

For a first pass over a trial only. A dispatch mode changes what backward allocates, so nothing is
measured under this one: it works out what the program reads from the device, the driver keeps the
answers in order, and the pass that measures has no mode and is answered by the driver.

Each small tensor on the card has a shadow on the host, and what is done to the one is done to the
other. A value that depends on what has no shadow (weights, activations: what is too large to be
computed here) is assumed, and marked: everything computed from it is then assumed too.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

from memfit.virtual import control

Unknown = Literal["value", "shape"]
"""What an assumption decided: a value that host code read, or the size of a tensor."""
Note = Callable[[Unknown], None]

_MOST_FLOAT_BYTES = 1 << 16
_MOST_OTHER_BYTES = 1 << 21
"""Larger storages have no shadow. Counts, masks and indices are worth more than activations."""

_UNWRITTEN = ("empty", "new_empty")
_OVERWRITES = frozenset(
    (
        "zero_",
        "fill_",
        "copy_",
        "uniform_",
        "normal_",
        "random_",
        "bernoulli_",
        "exponential_",
        "geometric_",
        "log_normal_",
        "cauchy_",
    )
)
"""In-place operations after which nothing is left of what was there."""
_CONSTANTS = frozenset(("zeros_like", "ones_like", "full_like", "new_zeros", "new_ones"))
"""Operations whose result has nothing of their input but its form."""
_SUMMARIES = frozenset(("all", "any", "sum", "count_nonzero"))
"""What is asked of flags as a whole; of blank ones, the answer is assumed."""


_FLAGS = (torch.bool, torch.uint8)
_BOUNDS: dict[str, Callable[[Sequence[int]], int]] = {
    "bitwise_or": sum,
    "logical_or": sum,
    "cat": sum,
    "bitwise_and": min,
    "logical_and": min,
    "_to_copy": min,
    "clone": min,
}
"""How many flags are true at most after an operation, from how many are in its inputs."""


@dataclass(slots=True)
class _Shadow:
    """Host storage that holds what a storage on the card would hold."""

    storage: torch.UntypedStorage
    assumed: bool
    blank: bool = False
    """Whether it holds flags of which nothing is known, not even by way of other assumptions."""
    most: int | None = None
    """How many of its flags are true at most, where that is known though the flags are not."""


@dataclass(frozen=True, slots=True)
class _Mask:
    """The elements of a tensor that count as true."""

    values: torch.Tensor | None
    """On the host; None where it is too large to be worked out."""
    count: int
    assumed: bool


class ValueMode(TorchDispatchMode):
    """Keeps the values of small tensors, and answers what is read from the card."""

    supports_higher_order_operators = True

    def __init__(self, *, share: float, note: Note) -> None:
        """Begin without any value.

        Args:
            share: The share of a mask's or set's unknown elements that is taken to count.
            note: Told whenever an assumed value is read or decides a shape.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self._share = share
        self._note = note
        self._shadows: dict[int, _Shadow] = {}
        self._readers: dict[str, Callable[[Any, Any, Any], Any]] = {
            "_local_scalar_dense": self._item,
            "_to_copy": self._copied,
            "copy_": self._copied,
            "nonzero": self._nonzero,
            "_to_sparse": self._nonzero,
            "masked_select": self._masked_select,
            "index": self._indexed,
            "index_put": self._indexed,
            "index_put_": self._indexed,
            "_index_put_impl_": self._indexed,
            "_unique2": self._unique,
            "unique_dim": self._unique,
            "unique_consecutive": self._unique,
            "repeat_interleave": self._repeated,
            "bincount": self._counted,
            "equal": self._compared,
            "linalg_matrix_exp": self._exponential,
            "lift_fresh": self._lifted,
            "torchvision::nms": self._suppressed,
        }
        self._sparse_readers = {"_coalesce": self._coalesced, "clone": self._cloned}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation on the card, and beside it on the shadows."""
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload) or not all(map(_is_plain, types)):  # noqa: SLF001
            return func(*args, **kwargs)
        name = func._schema.name.removeprefix("aten::")  # noqa: SLF001
        reader = self._readers.get(name)
        if reader is not None and any(map(_on_card, tree_iter(args))):
            try:
                return reader(func, args, kwargs)
            finally:
                control.drop_answers()
        reader = self._sparse_readers.get(name)
        if reader is not None and _is_sparse(args[0]) and args[0].layout is torch.sparse_coo:
            return reader(func, args, kwargs)
        out = func(*args, **kwargs)
        self._follow(func, name, args, kwargs, out)
        return out

    # -- shadows -----------------------------------------------------------------------------

    def _shadow(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The tensor's twin on the host, over its storage's shadow."""
        if not tensor.is_cuda:
            return tensor
        if tensor.numel() == 0:
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        shadow = self._shadows.get(_key(tensor))
        if shadow is None:
            return None
        bytes_needed = (_extent(tensor) + tensor.storage_offset()) * tensor.element_size()
        if bytes_needed > shadow.storage.nbytes():
            return None
        twin = torch.empty(0, dtype=tensor.dtype).set_(
            shadow.storage, tensor.storage_offset(), tensor.shape, tensor.stride()
        )
        twin = twin.conj() if tensor.is_conj() else twin
        return torch._neg_view(twin) if tensor.is_neg() else twin  # noqa: SLF001

    def _is_assumed(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's values are not known, though it may have a shadow."""
        if not tensor.is_cuda or tensor.numel() == 0:
            return False
        shadow = self._shadows.get(_key(tensor))
        return shadow is None or shadow.assumed

    def _is_blank(self, tensor: torch.Tensor) -> bool:
        shadow = self._shadows.get(_key(tensor))
        return shadow is not None and shadow.blank

    def _new_shadow(self, tensor: torch.Tensor, *, assumed: bool) -> torch.Tensor | None:
        """Give a tensor's storage a shadow of zeros, or none where it is too large."""
        key = _key(tensor)
        if not key:
            return None
        if not _fits(tensor):
            self._forget(tensor)
            return None
        size = tensor.untyped_storage().nbytes()
        storage = torch.zeros(size, dtype=torch.uint8).untyped_storage()
        self._shadows[key] = _Shadow(storage, assumed)
        return self._shadow(tensor)

    def _forget(self, tensor: torch.Tensor) -> None:
        if self._shadows.pop(_key(tensor), None) is not None:
            control.poke(_key(tensor), None, tensor.untyped_storage().nbytes())

    def _put_on_card(self, tensor: torch.Tensor) -> None:
        """Let code that reads behind the dispatcher's back see the values too."""
        key = _key(tensor)
        shadow = self._shadows.get(key)
        if shadow is not None:
            control.poke(key, shadow.storage.data_ptr(), shadow.storage.nbytes())

    # -- operations --------------------------------------------------------------------------

    def _follow(self, func: Any, name: str, args: Any, kwargs: Any, out: Any) -> None:
        """Do to the shadows what was done on the card."""
        inputs = [t for t in tree_iter((args, kwargs)) if _on_card(t)]
        keys = {_key(t) for t in inputs}
        fresh = [t for t in tree_iter(out) if _on_card(t) and _key(t) not in keys]
        written = [t for t in _written(func, args, kwargs) if _on_card(t)]
        if not fresh and not written:
            return
        most = self._bound(name, inputs, fresh)
        self._bind(written, None)
        if name.startswith(_UNWRITTEN):
            for tensor in fresh:
                self._new_shadow(tensor, assumed=False)
            return
        if name in _OVERWRITES and written:
            self._begin_anew(written[0])
        if func.namespace != "aten":
            self._lose(fresh, written)
            return
        if any(map(_is_sparse, tree_iter((args, kwargs)))):
            if not _is_view(func):  # its indices and values keep what is known of them
                self._assume(name, args, fresh, written)
            return
        blank = name in _SUMMARIES and any(map(self._is_blank, inputs))
        if blank or not self._compute(
            func, args, kwargs, out, inputs=inputs, fresh=fresh, written=written
        ):
            self._assume(name, args, fresh, written)
        self._bind(fresh, most)

    def _bind(self, tensors: Sequence[torch.Tensor], most: int | None) -> None:
        """Keep how many flags of tensors are true at most."""
        for tensor in tensors:
            if (shadow := self._shadows.get(_key(tensor))) is not None:
                shadow.most = most

    def _bound(
        self, name: str, inputs: Sequence[torch.Tensor], fresh: Sequence[torch.Tensor]
    ) -> int | None:
        """How many flags of a result are true at most, where its inputs tell."""
        flags = name in _BOUNDS and all(t.dtype in _FLAGS for t in (*inputs, *fresh))
        return _BOUNDS[name]([self._most(t) for t in inputs]) if flags and inputs else None

    def _most(self, tensor: torch.Tensor) -> int:
        """How many elements of a tensor are true at most."""
        value = self._shadow(tensor)
        if value is not None and not self._is_assumed(tensor):
            return int((value != 0).sum())
        shadow = self._shadows.get(_key(tensor))
        most = None if shadow is None or tensor.dtype not in _FLAGS else shadow.most
        return tensor.numel() if most is None else min(most, tensor.numel())

    def _begin_anew(self, tensor: torch.Tensor) -> None:
        """A tensor that fills its storage is about to be overwritten."""
        if tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes():
            self._new_shadow(tensor, assumed=False)

    def _lose(self, fresh: Sequence[torch.Tensor], written: Sequence[torch.Tensor]) -> None:
        """Nothing is known of what someone else's operation writes, unless the driver knows."""
        for tensor in (*fresh, *written):
            self._shadows.pop(_key(tensor), None)

    def _compute(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        out: Any,
        *,
        inputs: Sequence[torch.Tensor],
        fresh: Sequence[torch.Tensor],
        written: Sequence[torch.Tensor],
    ) -> bool:
        """Run an operation on the shadows; False where one is missing or it cannot be run."""
        if not all(map(_fits, (*fresh, *written))):
            return False
        twins: dict[int, torch.Tensor] = {}
        for tensor in inputs:
            twin = self._shadow(tensor)
            if twin is None:
                return False
            twins[id(tensor)] = twin
        constant = func._schema.name.removeprefix("aten::") in _CONSTANTS  # noqa: SLF001
        assumed = not constant and any(map(self._is_assumed, inputs))
        blank = not constant and any(map(self._is_blank, inputs))
        try:
            with _private_random(func):
                result = func(*_on_host(args, twins), **_host_options(_on_host(kwargs, twins)))
        except Exception:  # noqa: BLE001 - the host lacks some of the card's operations
            return False
        self._store(out, result, fresh, assumed=assumed, blank=blank)
        for tensor in written:
            if (shadow := self._shadows.get(_key(tensor))) is not None:
                shadow.assumed = shadow.assumed or assumed
            self._put_on_card(tensor)
        return True

    def _store(
        self,
        out: Any,
        result: Any,
        fresh: Sequence[torch.Tensor],
        *,
        assumed: bool,
        blank: bool = False,
    ) -> None:
        """Keep the values of fresh tensors."""
        wanted = {id(tensor) for tensor in fresh}
        for tensor, value in zip(tree_iter(out), tree_iter(result), strict=False):
            if id(tensor) not in wanted:
                continue
            same = isinstance(value, torch.Tensor) and value.shape == tensor.shape
            twin = self._new_shadow(tensor, assumed=assumed or not same)
            if twin is not None and same:
                twin.copy_(value)
                self._shadows[_key(tensor)].blank = blank and tensor.dtype is torch.bool
            self._put_on_card(tensor)

    def _assume(
        self,
        name: str,
        args: Any,
        fresh: Sequence[torch.Tensor],
        written: Sequence[torch.Tensor],
    ) -> None:
        """Give the results of unknown inputs a value to go on with."""
        for tensor in written:
            shadow = self._shadows.get(_key(tensor))
            # A gradient scaler asks whether anything overflowed: nothing did.
            if shadow is not None and not name.startswith("_amp_"):
                shadow.assumed = True
        for tensor in fresh:
            twin = self._new_shadow(tensor, assumed=True)
            if twin is not None:
                twin.fill_(self._assumption(name, args, tensor))
                self._shadows[_key(tensor)].blank = (
                    tensor.dtype is torch.bool and name not in _SUMMARIES
                )
                self._put_on_card(tensor)

    def _assumption(self, name: str, args: Any, result: torch.Tensor) -> complex:
        """Flags are false, unless they say that something holds for all; numbers are 1."""
        if result.dtype is torch.bool:
            return name == "all"
        first = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if name in ("sum", "count_nonzero") and first is not None and first.dtype is torch.bool:
            return round(self._share * first.numel() / max(result.numel(), 1))
        return 1 if result.is_floating_point() or result.is_complex() else 0

    # -- reads -------------------------------------------------------------------------------

    def _item(self, func: Any, args: Any, kwargs: Any) -> Any:
        value = self._shadow(args[0])
        if value is None and args[0].is_floating_point():
            value = torch.ones((), dtype=args[0].dtype)
        if value is not None:
            value = value.resolve_conj().resolve_neg().clone()
            control.answer_bytes(value.data_ptr(), value.element_size())
            if self._is_assumed(args[0]):
                self._note("value")
        return func(*args, **kwargs)

    def _copied(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A copy: to the host, it is a read."""
        target = args[0] if func._schema.name == "aten::copy_" else None  # noqa: SLF001
        source = args[0] if target is None else args[1]
        device = kwargs.get("device") if target is None else target.device
        if not source.is_cuda or device is None or torch.device(device).type != "cpu":
            out = func(*args, **kwargs)
            self._follow(func, "copy_" if target is not None else "_to_copy", args, kwargs, out)
            return out
        dtype = target.dtype if target is not None else kwargs.get("dtype") or source.dtype
        shape = target.shape if target is not None else source.shape
        value = self._shadow(source)
        if value is not None and source.numel():
            plain = dtype == source.dtype and (target is None or target.stride() == source.stride())
            data = _as_it_lies(value) if plain else None
            if data is None:  # gathered on the card, and converted on the host
                data = value.expand(shape).contiguous()
            control.answer_bytes(data.data_ptr(), data.numel() * data.element_size())
            if self._is_assumed(source):
                self._note("value")
        return func(*args, **kwargs)

    def _lifted(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A tensor made of Python values: it was filled where no mode sees it."""
        tensor = args[0]
        if _on_card(tensor) and self._new_shadow(tensor, assumed=False) is not None:
            storage = self._shadows[_key(tensor)].storage
            size = tensor.numel() * tensor.element_size()
            if not control.peek(storage.data_ptr(), _key(tensor), size):
                self._forget(tensor)
        return func(*args, **kwargs)

    def _mask(self, tensor: torch.Tensor) -> _Mask:
        """Which elements count as true: those that are, or the share that is assumed."""
        value = self._shadow(tensor)
        if value is not None and not self._is_assumed(tensor):
            value = value != 0
            return _Mask(value, int(value.sum()), assumed=False)
        count = round(self._share * self._most(tensor))
        if tensor.numel() > _MOST_OTHER_BYTES:
            return _Mask(None, count, assumed=True)
        value = torch.zeros(tensor.numel(), dtype=torch.bool)
        value[:count] = True
        return _Mask(value.view(tensor.shape), count, assumed=True)

    def _note_size(self, *, assumed: bool) -> None:
        if assumed:
            self._note("shape")

    def _answered(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        counts: Sequence[int],
        twins: dict[int, torch.Tensor | None],
        *,
        assumed: bool,
    ) -> Any:
        """Run an operation whose own reads are answered, and keep what it yields."""
        for count in counts:
            control.answer_count(count)
        out = func(*args, **kwargs)
        inputs = [t for t in tree_iter((args, kwargs)) if _on_card(t)]
        keys = {_key(t) for t in inputs}
        fresh = [t for t in tree_iter(out) if _on_card(t) and _key(t) not in keys]
        written = [t for t in _written(func, args, kwargs) if _on_card(t)]
        known = {id(t): twins.get(id(t), self._shadow(t)) for t in inputs}
        complete = {key: twin for key, twin in known.items() if twin is not None}
        if len(complete) == len(known) and all(map(_fits, (*fresh, *written))):
            with contextlib.suppress(Exception):
                result = func(
                    *_on_host(args, complete), **_host_options(_on_host(kwargs, complete))
                )
                self._store(out, result, fresh, assumed=assumed)
                for tensor in written:
                    self._shadows[_key(tensor)].assumed |= assumed
                    self._put_on_card(tensor)
                return out
        self._assume("", args, fresh, written)
        return out

    def _nonzero(self, func: Any, args: Any, kwargs: Any) -> Any:
        mask = self._mask(args[0])
        self._note_size(assumed=mask.assumed)
        twins = {id(args[0]): mask.values}
        return self._answered(func, args, kwargs, [mask.count], twins, assumed=mask.assumed)

    def _masked_select(self, func: Any, args: Any, kwargs: Any) -> Any:
        source, chosen = args[:2]
        mask = self._mask(chosen)
        shape = torch.broadcast_shapes(source.shape, chosen.shape)  # type: ignore[no-untyped-call]
        whole = math.prod(shape)
        count = mask.count * (whole // max(chosen.numel(), 1))
        self._note_size(assumed=mask.assumed)
        assumed = mask.assumed or self._is_assumed(source)
        return self._answered(
            func, args, kwargs, [count], {id(chosen): mask.values}, assumed=assumed
        )

    def _indexed(self, func: Any, args: Any, kwargs: Any) -> Any:
        indices = [t for t in args[1] if isinstance(t, torch.Tensor)]
        chosen = [t for t in indices if _on_card(t) and t.dtype in (torch.bool, torch.uint8)]
        masks = [(t, self._mask(t)) for t in chosen]
        counts = [mask.count for _, mask in masks]
        others = [t for t in tree_iter((args, kwargs)) if _on_card(t)]
        self._note_size(assumed=any(mask.assumed for _, mask in masks))
        most = self._most_set(args, indices)
        out = self._answered(
            func,
            args,
            kwargs,
            counts,
            {id(t): mask.values for t, mask in masks},
            assumed=any(map(self._is_assumed, others)),
        )
        if "index_put" in func._schema.name:  # noqa: SLF001
            self._bind([args[0]], most)
        return out

    def _most_set(self, args: Any, indices: Sequence[torch.Tensor]) -> int | None:
        """How many flags are true at most when one is set at each index."""
        target = args[0]
        if len(args) < 3 or target.dtype not in _FLAGS or len(indices) != 1 or target.dim() != 1:  # noqa: PLR2004
            return None
        index = indices[0]
        chosen = self._most(index) if index.dtype in _FLAGS else index.numel()
        return int(min(self._most(target) + chosen, target.numel()))

    def _unique(self, func: Any, args: Any, kwargs: Any) -> Any:
        assumed, source = self._is_assumed(args[0]), self._shadow(args[0])
        self._note_size(assumed=assumed)
        if assumed or source is None:
            dim = args[1] if func._schema.name == "aten::unique_dim" else None  # noqa: SLF001
            size = args[0].numel() if dim is None else args[0].shape[dim]
            count = min(max(round(self._share * size), 1), size)
            return self._answered(func, args, kwargs, [count], {id(args[0]): None}, assumed=True)
        count = func(source, *args[1:], **kwargs)[0].shape[
            args[1] if func._schema.name == "aten::unique_dim" else 0  # noqa: SLF001
        ]
        return self._answered(func, args, kwargs, [count], {}, assumed=False)

    def _coalesced(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A sparse tensor's rows that have the same indices are added up."""
        indices = args[0]._indices()  # noqa: SLF001
        value, entries = self._shadow(indices), indices.shape[1]
        assumed = value is None or self._is_assumed(indices)
        self._note_size(assumed=assumed and entries > 1)
        if value is None or assumed:
            control.answer_count(min(max(round(self._share * entries), 1), entries))
        else:
            value = torch.unique(value, dim=1)
            control.answer_count(value.shape[1])
        try:
            out = func(*args, **kwargs)
        finally:
            control.drop_answers()
        self._store(out._indices(), value, [out._indices()], assumed=assumed)  # noqa: SLF001
        return out

    def _cloned(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A sparse tensor's copy has its indices."""
        out, indices = func(*args, **kwargs), args[0]._indices()  # noqa: SLF001
        value, assumed = self._shadow(indices), self._is_assumed(indices)
        self._store(out._indices(), value, [out._indices()], assumed=assumed)  # noqa: SLF001
        return out

    def _suppressed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Boxes that overlap a better one are dropped: of unknown ones, the share stays."""
        boxes, scores = args[:2]
        known = [self._shadow(tensor) for tensor in (boxes, scores)]
        assumed = any(map(self._is_assumed, (boxes, scores)))
        self._note_size(assumed=assumed and len(boxes) > 0)
        if assumed:
            count = min(max(round(self._share * len(boxes)), 1), len(boxes))
            return self._answered(func, args, kwargs, [count], {id(boxes): None}, assumed=True)
        kept = func(*known, *args[2:], **kwargs)
        return self._answered(func, args, kwargs, [len(kept)], {}, assumed=False)

    def _repeated(self, func: Any, args: Any, kwargs: Any) -> Any:
        times, value = args[0], self._shadow(args[0])
        assumed = self._is_assumed(times)
        total = times.numel() if value is None else int(value.sum())
        counts = [] if kwargs.get("output_size") is not None else [total, 1]
        self._note_size(assumed=assumed and bool(counts))
        return self._answered(func, args, kwargs, counts, {}, assumed=assumed)

    def _counted(self, func: Any, args: Any, kwargs: Any) -> Any:
        value = self._shadow(args[0])
        known = value is not None and value.numel() > 0
        counts = [int(value.min()), int(value.max())] if known and value is not None else []
        assumed = any(self._is_assumed(t) for t in tree_iter((args, kwargs)) if _on_card(t))
        self._note_size(assumed=assumed)
        return self._answered(func, args, kwargs, counts, {}, assumed=assumed)

    def _exponential(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A batch is sorted by its matrices' norms: all get the polynomial that costs most."""
        batch = math.prod(args[0].shape[:-2])
        counts = [batch] if args[0].dim() > 2 and batch else []  # noqa: PLR2004
        self._note_size(assumed=bool(counts))
        return self._answered(func, args, kwargs, counts, {id(args[0]): None}, assumed=True)

    def _compared(self, func: Any, args: Any, kwargs: Any) -> Any:
        one, other = self._shadow(args[0]), self._shadow(args[1])
        if one is not None and other is not None:
            control.answer_count(int(torch.equal(one, other)))
            if self._is_assumed(args[0]) or self._is_assumed(args[1]):
                self._note("value")
        return func(*args, **kwargs)


def _is_plain(kind: Any) -> bool:
    """Whether operations on this kind of tensor are done by the card."""
    return kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__


def _on_card(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_cuda and value.layout is torch.strided


def _is_sparse(value: Any) -> bool:
    """Whether a tensor on the card consists of several, for which there is no twin."""
    return isinstance(value, torch.Tensor) and value.is_cuda and value.layout is not torch.strided


def _is_view(func: Any) -> bool:
    """Whether an operation yields memory of its input, and writes nothing."""
    alias = func._schema.returns[0].alias_info if func._schema.returns else None  # noqa: SLF001
    return alias is not None and not alias.is_write


def _key(tensor: torch.Tensor) -> int:
    """Address of the tensor's storage; 0 for an empty one."""
    return tensor.untyped_storage().data_ptr()


def _fits(tensor: torch.Tensor) -> bool:
    floats = tensor.is_floating_point() or tensor.is_complex()
    most = _MOST_FLOAT_BYTES if floats else _MOST_OTHER_BYTES
    return tensor.untyped_storage().nbytes() <= most


def _extent(tensor: torch.Tensor) -> int:
    """Elements of its storage that a tensor reaches over, from its first."""
    return 1 + sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def _as_it_lies(value: torch.Tensor) -> torch.Tensor | None:
    """The elements in the order of memory, where the tensor leaves no gaps."""
    if _extent(value) != value.numel() or 0 in value.stride():
        return value.contiguous() if value.numel() == 1 else None
    return value.as_strided((value.numel(),), (1,)).clone()


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[Any]:
    """The arguments that an operation writes to."""
    for index, argument in enumerate(func._schema.arguments):  # noqa: SLF001
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            yield from tree_iter(value)


def _on_host(values: Any, twins: dict[int, torch.Tensor]) -> Any:
    return tree_map(lambda value: twins.get(id(value), value), values)


def _host_options(options: Any) -> Any:
    """The same options for the host."""
    changed = dict(options)
    if "device" in changed:
        changed["device"] = torch.device("cpu")
    for name, value in (("pin_memory", False), ("generator", None)):
        if name in changed:
            changed[name] = value
    return changed


@contextlib.contextmanager
def _private_random(func: Any) -> Iterator[None]:
    """Leave the host's random numbers to the program."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        yield
        return
    state = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(state)
