"""Running a model in float64 that casts to narrower types by itself.

`logits.float()`, attention in bfloat16, an autocast inside of loss: each would round in the middle
of the reference. While the context lasts, whatever asks for a narrower floating type gets float64.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_NARROWER = frozenset({torch.float32, torch.bfloat16, torch.float16})


class Widening(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Turns casts to narrower floating types into casts to float64."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run one operator."""
        if kwargs and kwargs.get("dtype") in _NARROWER:
            kwargs = {**kwargs, "dtype": torch.float64}
        return func(*args, **(kwargs or {}))
