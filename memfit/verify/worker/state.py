"""Layers whose output for one example depends on the others, found by what they do.

Every module is run a second time on half of its own input, at the moment of its call (or with other
neighbours, where it refuses a half): when the half's output differs from the same half of the whole
output, the module mixes examples.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import torch

from memfit.verification import Place
from memfit.verify.worker import places

_FAR = 1e-6
"""Relative difference of outputs that rounding in float32 or float64 does not explain here; a
layer that normalises over the batch changes its output by much more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixer:
    """A module that mixes examples."""

    name: str
    module: torch.nn.Module
    place: Place | None
    change: float
    """Relative change of its output without half of the neighbours."""


class MixerSearch:
    """Hooks on the modules of a model, while the context lasts."""

    def __init__(self, model: torch.nn.Module, examples: int, *, inside: bool) -> None:
        """Prepare for a forward pass over a batch of this many examples.

        Args:
            model: The model.
            examples: Examples of the batch.
            inside: Whether to look at every module, and not only at those that the loss calls:
                each one that holds others is then run again as often as it is nested.
        """
        self._model = model
        self._examples = examples
        self._inside = inside
        self._depth = 0
        self.conclusive = True
        """Whether all that the loss called could be compared, so that nothing mixes where nothing
        was found."""
        self._busy = False
        self._found: dict[torch.nn.Module, Mixer] = {}
        self._names = {module: name for name, module in model.named_modules()}
        self._handles: list[Any] = []

    def __enter__(self) -> Self:
        """Hook in."""
        for module in self._names:
            self._handles += [
                module.register_forward_pre_hook(self._enter),
                module.register_forward_hook(
                    self._look, with_kwargs=True, prepend=False, always_call=True
                ),
            ]
        return self

    def __exit__(self, *exception: object) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()

    def found(self) -> tuple[Mixer, ...]:
        """Return the innermost modules that mix examples, in the order of the model."""
        return tuple(
            self._found[module]
            for module in self._names
            if module in self._found
            and not any(child in self._found for child in module.modules() if child is not module)
        )

    def _enter(self, _module: torch.nn.Module, _args: Any) -> None:
        self._depth += not self._busy

    def _look(self, module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self._busy:
            return
        self._depth -= 1
        if module in self._found or (self._depth and not self._inside):
            return
        self._busy = True
        buffers = [(b, b.clone()) for b in module.buffers()]
        try:
            with torch.no_grad():
                self._compare(module, args, kwargs, output)
        except Exception:  # noqa: BLE001 - a half that a module does not take shows nothing
            self.conclusive = False
        finally:
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)
            self._busy = False

    def _compare(self, module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        rows = next((t.shape[0] for t in _tensors((args, kwargs)) if t.ndim), 0)
        if rows < self._examples or rows % self._examples:
            self.conclusive = False
            return
        kept = self._examples // 2 * (rows // self._examples)
        try:
            half = module.forward(*_head(args, rows, kept), **_head(kwargs, rows, kept))
        except Exception:  # noqa: BLE001 - as batch normalisation refuses a single value
            args, kwargs = _others(args, rows, kept), _others(kwargs, rows, kept)
            half = module.forward(*args, **kwargs)
        compared = False
        for whole, part in zip(_tensors(output), _tensors(half), strict=True):
            if not whole.ndim or whole.shape[0] != rows or part.shape[0] not in (kept, rows):
                continue
            if not whole.is_floating_point():
                continue
            compared = True
            expected = whole[:kept]
            size = float(expected.double().norm()) or 1.0
            change = float((part[:kept].double() - expected.double()).norm()) / size
            if change > _FAR:
                self._found[module] = Mixer(
                    name=self._names[module],
                    module=module,
                    place=places.of_method(type(module), "forward") or places.here(),
                    change=change,
                )
                return
        self.conclusive &= compared


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _head(value: Any, rows: int, kept: int) -> Any:
    if isinstance(value, torch.Tensor):
        return value[:kept].detach() if value.ndim and value.shape[0] == rows else value
    if isinstance(value, dict):
        return {key: _head(item, rows, kept) for key, item in value.items()}
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return type(value)(_head(item, rows, kept) for item in value)
    return value


def _others(value: Any, rows: int, kept: int) -> Any:
    """Give the kept rows other neighbours: copies of the first of them."""
    if isinstance(value, torch.Tensor):
        if not value.ndim or value.shape[0] != rows:
            return value
        return torch.cat((value[:kept], value[:1].expand(rows - kept, *value.shape[1:]))).detach()
    if isinstance(value, dict):
        return {key: _others(item, rows, kept) for key, item in value.items()}
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return type(value)(_others(item, rows, kept) for item in value)
    return value


class SizeWatch:
    """Notes how many terms an entry of a gradient sums at most, from what the modules make.

    A weight's entry is summed over all but the last dimension of its layer's output, and over that
    one too where the parameter has a single entry; on the way back, the last is summed over.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        """Prepare to watch a model."""
        self._model = model
        self._handles: list[Any] = []
        self.largest = 1

    def __enter__(self) -> Self:
        """Hook in."""
        self._handles = [m.register_forward_hook(self._note) for m in self._model.modules()]
        return self

    def __exit__(self, *exception: object) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()

    def _note(self, module: torch.nn.Module, _args: Any, output: Any) -> None:
        single = any(p.numel() == 1 for p in module.parameters(recurse=False))
        for tensor in _tensors(output):
            last = tensor.shape[-1] if tensor.ndim and tensor.numel() and not single else 1
            self.largest = max(self.largest, tensor.numel() // last, last)
