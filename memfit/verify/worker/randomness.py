"""Random draws of a model: seen where they happen, and held still on demand.

An operator that draws is known by its tag in the dispatcher, whatever module or function called
it. Held still, each draw is replaced by its mean (a permutation by the identity), so that dropout
keeps everything and noise is zero: the same for every example, in any batch.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from memfit.verification import Place
from memfit.verify.worker.places import here


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """One place that draws."""

    operator: str
    place: Place | None
    times: int


class Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes every random draw while it is active, and holds it still when told to."""

    def __init__(self, *, still: bool) -> None:
        """Watch; with `still`, replace draws by their means."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._still = still
        self._seen: dict[tuple[str, Place | None], int] = {}
        self.unheld: set[str] = set()
        """Operators that draw and could not be held still."""

    @property
    def seen(self) -> tuple[Draw, ...]:
        """What drew, in the order of its first time."""
        return tuple(
            Draw(operator=name, place=place, times=times)
            for (name, place), times in self._seen.items()
        )

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run one operator."""
        kwargs = dict(kwargs or {})
        drops = _drop_probability(func, args, kwargs)
        # One that can drop and does not, such as attention without dropout, draws nothing.
        draws = torch.Tag.nondeterministic_seeded in func.tags and (drops or not _drops(func))
        if not draws and not drops:
            return func(*args, **kwargs)
        name = func._schema.name.removeprefix("aten::")  # noqa: SLF001 - the operator's name
        if not draws or not _is_idle(name, args):
            key = (name.rstrip("_"), here())
            self._seen[key] = self._seen.get(key, 0) + 1
        if not self._still:
            return func(*args, **kwargs)
        if drops:
            args, kwargs = _without_drop(func, args, kwargs)
            return func(*args, **kwargs)
        held = _MEANS.get(name)
        if held is None:
            self.unheld.add(name)
            return func(*args, **kwargs)
        return held(func, args, kwargs)


def _is_idle(name: str, args: tuple[Any, ...]) -> bool:
    """Whether the draw has only one outcome, as a dropout that keeps everything."""
    return name == "bernoulli_" and len(args) > 1 and args[1] in (0.0, 1.0)


_DROPS = ("dropout_p", "dropout")


@functools.cache
def _drops(func: Any) -> tuple[tuple[int, str], ...]:
    """Return position and name of an operator's arguments that are a probability of dropping."""
    arguments = enumerate(func._schema.arguments)  # noqa: SLF001
    return tuple((index, a.name) for index, a in arguments if a.name in _DROPS)


def _drop_probability(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    for index, name in _drops(func):
        value = args[index] if index < len(args) else kwargs.get(name, 0.0)
        if isinstance(value, float) and value > 0:
            return True
    return False


def _without_drop(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    changed = list(args)
    for index, name in _drops(func):
        if index < len(changed):
            changed[index] = 0.0
        else:
            kwargs = {**kwargs, name: 0.0}
    return tuple(changed), kwargs


_Held = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


def _arg(args: tuple[Any, ...], kwargs: dict[str, Any], index: int, name: str, default: Any) -> Any:
    return args[index] if index < len(args) else kwargs.get(name, default)


def _fill(value: Callable[..., Any]) -> _Held:
    """Hold an in-place draw: the tensor is filled with the mean of its distribution."""

    def held(_func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        mean = value(*args[1:], **{k: v for k, v in kwargs.items() if k != "generator"})
        return args[0].copy_(mean) if isinstance(mean, torch.Tensor) else args[0].fill_(mean)

    return held


def _then(value: float) -> _Held:
    """Hold a draw that makes a tensor: run it for its form, then fill it."""

    def held(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return func(*args, **kwargs).fill_(value)

    return held


def _lowest(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    made = func(*args, **kwargs)
    names = [a.name for a in func._schema.arguments]  # noqa: SLF001
    low = args[names.index("low")] if "low" in names and names.index("low") < len(args) else 0
    return made.fill_(low)


def _identity(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    made = func(*args, **kwargs)
    return made.copy_(torch.arange(made.numel(), device=made.device))


def _itself(_func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    return args[0].clone()


def _bernoulli(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if len(args) > 1:
        return torch.full_like(args[0], args[1])
    return _itself(func, args, kwargs)


def _normal(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    made = func(*args, **kwargs)
    return made.copy_(args[0]) if isinstance(args[0], torch.Tensor) else made.fill_(args[0])


def _likeliest(_func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    number = _arg(args, kwargs, 1, "num_samples", 1)
    replacement = _arg(args, kwargs, 2, "replacement", False)  # noqa: FBT003
    if replacement:
        best = args[0].argmax(-1, keepdim=True)
        return best.expand(*best.shape[:-1], number).contiguous()
    return args[0].topk(number, dim=-1).indices


def _native_dropout(_func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    # Its backward multiplies by 1 / (1 - p), so that forward does so too.
    scale = 1.0 / (1.0 - args[1]) if args[2] is not False and args[1] < 1 else 1.0
    return args[0] * scale, torch.ones_like(args[0], dtype=torch.bool)


def _rrelu(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    changed = list(args)
    noise = changed[1]
    noise.fill_((changed[2] + changed[3]) / 2).masked_fill_(changed[0] > 0, 1.0)
    changed[4] = False
    return func(*changed, **kwargs)


_MEANS: dict[str, _Held] = {
    "bernoulli_": _fill(lambda p=0.5, **_: p),
    "bernoulli": _bernoulli,
    "uniform_": _fill(lambda low=0.0, high=1.0, **k: (k.get("from", low) + k.get("to", high)) / 2),
    "normal_": _fill(lambda mean=0.0, std=1.0, **_: mean),  # noqa: ARG005
    "exponential_": _fill(lambda lambd=1.0, **_: 1 / lambd),
    "cauchy_": _fill(lambda median=0.0, *_, **__: median),
    "log_normal_": _fill(lambda mean=1.0, std=2.0, **_: 2.718281828459045 ** (mean + std**2 / 2)),
    "geometric_": _fill(lambda p, **_: 1 / p),
    "random_": _fill(lambda *bounds, **_: bounds[0] if len(bounds) > 1 else 0),
    "rand": _then(0.5),
    "rand_like": _then(0.5),
    "randn": _then(0.0),
    "randn_like": _then(0.0),
    "randint": _lowest,
    "randint_like": _lowest,
    "randperm": _identity,
    "normal": _normal,
    "normal_functional": _normal,
    "poisson": _itself,
    "_standard_gamma": _itself,
    "multinomial": _likeliest,
    "native_dropout": _native_dropout,
    "rrelu_with_noise": _rrelu,
}


class OtherGenerators:
    """The generators of Python and NumPy: whether they were drawn from, and bringing them back."""

    def __init__(self) -> None:
        """Note where they are."""
        import numpy as np  # noqa: PLC0415 - torch may come without it

        self._numpy = np.random
        self._python_state = random.getstate()
        self._numpy_state = np.random.get_state()  # noqa: NPY002 - the one that users draw from

    def drawn(self) -> list[str]:
        """Names of those that were drawn from since."""
        names = []
        if random.getstate() != self._python_state:
            names.append("Python's")
        state: Any = self._numpy.get_state()
        before: Any = self._numpy_state
        if state[2] != before[2] or (state[1] != before[1]).any():
            names.append("NumPy's")
        return names

    def restore(self) -> None:
        """Bring them back to where they were."""
        random.setstate(self._python_state)
        self._numpy.set_state(self._numpy_state)
