"""Watching a loop that is not memfit's: what it does with gradients, in the order it does it.

The places where a loop meets torch are wrapped while the context lasts: backward, optimizers,
gradient scalers, clipping, schedules, and the forward of the model. Nothing is changed about what
they do.
"""

from __future__ import annotations

import contextlib
import functools
import math
import signal
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.optim.lr_scheduler as schedules
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from memfit.verification import Place
from memfit.verify.events import Event
from memfit.verify.worker.lossgraph import LossReading, read_loss
from memfit.verify.worker.places import here

_MAX_ENTRIES = 20_000_000
"""Parameters above which the gradients of a watched loop are not added up a second time."""


_DIGESTED = 4096
"""Entries of a tensor that its checksum is over."""


_GRACE_S = 2.0
"""How much longer a program may run that makes no backward pass."""


class Enough(BaseException):
    """Raised in the loop when its time is up."""


class _Token:
    """Lives as long as the graph that it was put into."""

    __slots__ = ("__weakref__",)


class Watch:
    """Wraps torch while the context lasts, and notes what the loop does."""

    def __init__(self, *, seconds: float) -> None:
        """Prepare to watch for at most this long."""
        self.events: list[Event] = []
        self.unscaled_twice: Place | None = None
        self.ran_out = False
        self._deadline = time.monotonic() + seconds
        self._undo = contextlib.ExitStack()
        self._optimizers: list[weakref.ref[Any]] = []
        self._examples: int | None = None
        self._shape: tuple[int, ...] = ()
        self._digest: int | None = None
        self._forwards = 0
        self._depth = 0
        self._data_parallel: tuple[Any, bool] | None = None
        self._scaled: tuple[weakref.ref[torch.Tensor], float] | None = None
        self._unscaled = False
        self._in_scaler_step: bool | None = None
        self._in_schedule = False
        self._steps = 0
        self._schedule_seen: dict[int, int] = {}
        self._graphs: list[weakref.ref[_Token]] = []
        self._sum = _GroupSum()

    def __enter__(self) -> Watch:  # noqa: PYI034 - nobody derives from it
        """Wrap."""
        self._wrap(torch.autograd, "backward", self._backward)
        self._wrap(torch.optim.Optimizer, "__init__", self._new_optimizer)
        self._wrap(torch.optim.Optimizer, "zero_grad", self._zero_grad)
        self._wrap(torch.nn.Module, "zero_grad", self._zero_grad)
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            self._wrap(torch.nn.utils, name, self._clip)
            setattr(torch.nn.utils.clip_grad, name, getattr(torch.nn.utils, name))
        scaler = torch.amp.GradScaler
        self._wrap(scaler, "scale", self._scale)
        self._wrap(scaler, "unscale_", self._unscale)
        self._wrap(scaler, "step", self._scaler_step)
        self._wrap(scaler, "update", self._update)
        for kind in vars(schedules).values():
            if isinstance(kind, type) and issubclass(kind, schedules.LRScheduler):
                if "step" in vars(kind):
                    self._wrap(kind, "step", self._schedule)
                if "_initial_step" in vars(kind):
                    self._wrap(kind, "_initial_step", self._initial_schedule)
        self._wrap(torch.nn.Module, "__call__", self._call)
        self._undo.callback(register_optimizer_step_pre_hook(self._step).remove)
        return self

    def __exit__(self, *exception: object) -> None:
        """Put everything back."""
        self._undo.close()

    def _wrap(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return around(original, *args, **kwargs)

        setattr(owner, name, wrapped)
        self._undo.callback(setattr, owner, name, original)

    def _note(self, kind: Any, **facts: Any) -> None:
        self.events.append(Event(kind=kind, place=here(), **facts))

    # -- forward -----------------------------------------------------------------------------

    def _call(self, original: Any, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not self._depth:
            self._enter(module, [*args, *kwargs.values()])
        self._depth += 1
        try:
            return original(module, *args, **kwargs)
        finally:
            self._depth -= 1

    def _enter(self, module: torch.nn.Module, given: list[Any]) -> None:
        """Note the forward pass of a model that trains."""
        if not torch.is_grad_enabled() or not any(p.requires_grad for p in module.parameters()):
            return
        self._forwards += 1
        first = next((a for a in given if isinstance(a, torch.Tensor) and a.ndim), None)
        self._examples = None if first is None else int(first.shape[0])
        self._shape = () if first is None else tuple(first.shape)
        self._digest = None if first is None else digest(first)
        self._data_parallel = None
        if isinstance(module, DistributedDataParallel):
            self._data_parallel = (module, bool(module.require_backward_grad_sync))

    # -- backward ----------------------------------------------------------------------------

    def _backward(self, original: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if time.monotonic() > self._deadline:
            self.ran_out = True
            raise Enough
        loss = tensors if isinstance(tensors, torch.Tensor) else next(iter(tensors), None)
        if not isinstance(loss, torch.Tensor) or loss.grad_fn is None or not self._forwards:
            return original(tensors, *args, **kwargs)  # a second loss of the same forward
        self._forwards = 0
        scale = self._scale_of(loss)
        reading = read_loss(loss)
        alive = sum(graph() is not None for graph in self._graphs)
        token = _Token()
        metadata: Any = loss.grad_fn.metadata
        metadata["memfit"] = token
        self._graphs.append(weakref.ref(token))
        del token
        retained = kwargs.get("retain_graph", args[1] if len(args) > 1 else None)
        event = Event(
            kind="backward",
            place=here(),
            factor=None if reading is None else reading.factor / (scale or 1.0),
            reduction=None if reading is None else reading.reduction,
            elements=None if reading is None else reading.elements,
            examples=self._examples,
            shape=self._shape,
            digest=self._digest,
            scale=scale,
            cleared=self._is_clear(),
            graphs=alive,
            retained=bool(retained),
            synced=self._synced(),
        )
        self.events.append(event)
        parameters = self.parameters()
        self._sum.before(parameters)
        done = original(tensors, *args, **kwargs)
        self._sum.after(parameters, event, reading)
        return done

    def _scale_of(self, loss: torch.Tensor) -> float | None:
        if self._scaled is None:
            return None
        scaled, scale = self._scaled
        return scale if scaled() is loss else None

    def _synced(self) -> Any:
        if self._data_parallel is None:
            return None
        module, forward = self._data_parallel
        backward = bool(module.require_backward_grad_sync)
        return {
            (True, True): "both",
            (True, False): "forward",
            (False, True): "backward",
            (False, False): "none",
        }[forward, backward]

    def parameters(self) -> list[torch.Tensor]:
        """Return the parameters of every optimizer that the loop made and still has."""
        found: dict[int, torch.Tensor] = {}
        for reference in self._optimizers:
            optimizer = reference()
            for group in [] if optimizer is None else optimizer.param_groups:
                found.update({id(p): p for p in group["params"]})
        return list(found.values())

    def _is_clear(self) -> bool | None:
        parameters = self.parameters()
        if not parameters:
            return None
        return not any(p.grad is not None and bool(p.grad.any()) for p in parameters)

    # -- optimizers --------------------------------------------------------------------------

    def _new_optimizer(self, original: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        original(optimizer, *args, **kwargs)
        self._optimizers.append(weakref.ref(optimizer))

    def _step(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        self._steps += 1
        if not any(known() is optimizer for known in self._optimizers):  # made before the watch
            self._optimizers.append(weakref.ref(optimizer))
        if self._in_scaler_step is None:
            self._note("step", error=self._sum.close())
        else:
            self._in_scaler_step = True

    def _zero_grad(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        self._note("zero")
        return original(*args, **kwargs)

    def _clip(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        last = next((e for e in reversed(self.events) if e.kind == "backward"), None)
        scaled = last is not None and last.scale is not None and not self._unscaled
        self._note("clip", scaled=scaled)
        return original(*args, **kwargs)

    # -- scalers -----------------------------------------------------------------------------

    def _scale(self, original: Any, scaler: Any, outputs: Any) -> Any:
        made = original(scaler, outputs)
        if scaler.is_enabled() and isinstance(made, torch.Tensor):
            self._scaled = (weakref.ref(made), float(scaler.get_scale()))
        return made

    def _unscale(self, original: Any, scaler: Any, optimizer: Any) -> Any:
        if self._in_scaler_step is None and scaler.is_enabled():
            self._note("unscale")
            self._unscaled = True
        try:
            return original(scaler, optimizer)
        except RuntimeError as error:
            if "unscale_()" in str(error):
                self.unscaled_twice = here()
            raise

    def _scaler_step(self, original: Any, scaler: Any, optimizer: Any, *args: Any) -> Any:
        if not scaler.is_enabled():
            return original(scaler, optimizer, *args)
        self._in_scaler_step = False
        error = self._sum.close()
        try:
            return original(scaler, optimizer, *args)
        finally:
            self._steps += not self._in_scaler_step
            self._note("step", applied=self._in_scaler_step, error=error)
            self._in_scaler_step = None

    def _update(self, original: Any, scaler: Any, *args: Any, **kwargs: Any) -> Any:
        if scaler.is_enabled():
            self._note("update")
            self._unscaled = False
        return original(scaler, *args, **kwargs)

    # -- schedules ---------------------------------------------------------------------------

    def _schedule(self, original: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        if self._in_schedule:
            return original(scheduler, *args, **kwargs)
        self._in_schedule = True
        seen = self._schedule_seen.get(id(scheduler), 0)
        self._note("schedule", fresh=self._steps > seen)
        self._schedule_seen[id(scheduler)] = self._steps
        try:
            return original(scheduler, *args, **kwargs)
        finally:
            self._in_schedule = False

    def _initial_schedule(self, original: Any, scheduler: Any) -> Any:
        before, self._in_schedule = self._in_schedule, True
        try:
            return original(scheduler)
        finally:
            self._in_schedule = before
            self._schedule_seen[id(scheduler)] = self._steps


class _GroupSum:
    """Adds the mean over all elements of a group up, from the microbatches' own gradients."""

    def __init__(self) -> None:
        self._reset()
        self._before: list[torch.Tensor | None] = []

    def _reset(self) -> None:
        self._means: dict[int, torch.Tensor] = {}
        self._elements = 0
        self._usable = True
        self._reached: dict[int, torch.Tensor] = {}

    def before(self, parameters: list[torch.Tensor]) -> None:
        """Keep the gradients that are there when a backward begins."""
        alone = not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1
        entries = sum(p.numel() for p in parameters)
        self._usable = self._usable and alone and 0 < entries <= _MAX_ENTRIES
        if self._usable:
            self._before = [None if p.grad is None else p.grad.clone() for p in parameters]

    def after(
        self, parameters: list[torch.Tensor], event: Event, reading: LossReading | None
    ) -> None:
        """Add the microbatch's own mean gradient, weighted by its elements."""
        elements = event.elements or event.examples
        if reading is None or not elements or not event.factor:
            self._usable = False
        if not self._usable or event.factor is None or not elements:
            return
        share = event.factor * (elements if event.reduction == "sum" else 1)
        scale = event.scale or 1.0
        for parameter, before in zip(parameters, self._before, strict=True):
            if parameter.grad is None:
                continue
            own = parameter.grad if before is None else parameter.grad - before
            added = own.double() * (elements / (share * scale))
            key = id(parameter)
            self._means[key] = self._means[key] + added if key in self._means else added
            self._reached[key] = parameter.grad.double() / scale
        self._elements += elements
        self._before = []

    def close(self) -> float | None:
        """Return the relative error of the group's gradient, and begin the next group."""
        usable, means, reached = self._usable, self._means, self._reached
        elements = self._elements
        self._reset()
        if not usable or not elements or not means:
            return None
        apart = math.sqrt(
            sum(float((reached[k] - m / elements).norm()) ** 2 for k, m in means.items())
        )
        size = math.sqrt(sum(float((m / elements).norm()) ** 2 for m in means.values()))
        return apart / size if size and math.isfinite(apart / size) else None


def digest(value: torch.Tensor) -> int:
    """Return a checksum of a tensor's first values, by which equal examples are told."""
    flat = value.detach().flatten()[:_DIGESTED].cpu().contiguous()
    return zlib.crc32(bytes(flat.view(torch.uint8).tolist()), value.numel())


@contextlib.contextmanager
def watching(seconds: float) -> Iterator[Watch]:
    """Watch whatever runs inside the context; its end by time is no error.

    A loop is ended at a backward pass. A program that makes none is ended a while later, wherever
    it is, and again if it goes on.
    """
    watch = Watch(seconds=seconds)

    def end(_signal: int, _frame: object) -> None:
        watch.ran_out = True
        raise Enough

    with watch, contextlib.suppress(Enough), _alarm(seconds + _GRACE_S, end):
        yield watch


@contextlib.contextmanager
def _alarm(seconds: float, ring: Callable[[int, Any], None]) -> Iterator[None]:
    """Ring in the main thread after this long, and every second from then on."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
