"""Every optimizer of torch.optim, in each form that it has."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import torch
from torch import nn

from tests.compatibility.catalogue import Item, add
from tests.compatibility.training import CARD, integers, random, train

_FORMS: dict[str, dict[str, bool]] = {
    "for-loop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "capturable": {"capturable": True},
}


def _forms(kind: type[torch.optim.Optimizer]) -> dict[str, dict[str, bool]]:
    """The forms that this optimizer of this torch has."""
    known = inspect.signature(kind).parameters
    found = {form: given for form, given in _FORMS.items() if set(given) <= set(known)}
    return found or {"its only form": {}}


def _train(kind: Any, given: dict[str, Any]) -> None:
    if kind.__name__ == "SparseAdam":
        table = nn.Embedding(100, 16, sparse=True, device=CARD)
        tokens = integers(100, 8, 4)
        train(table, lambda: table(tokens).square().mean(), optimizer=kind(table.parameters()))
        return
    flat = kind.__name__ == "Muon"  # it takes matrices only
    model = nn.Sequential(*(nn.Linear(64, 64, bias=not flat) for _ in range(3))).to(CARD)
    x = random(8, 64)
    optimizer = kind(model.parameters(), **given)
    if kind.__name__ == "LBFGS":

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = model(x).square().mean()
            loss.backward()
            return loss

        for _ in range(2):
            optimizer.step(closure)
        assert optimizer.state
        return
    train(model, lambda: model(x).square().mean(), optimizer=optimizer)


def _run(name: str) -> str:
    kind = getattr(torch.optim, name)
    ran, refused = [], []
    for form, given in _forms(kind).items():
        extra = {"momentum": 0.9} if name == "SGD" else {}
        try:
            _train(kind, given | extra)
        except RuntimeError as error:
            if "requires all the params to be" not in str(error):
                raise
            refused.append(form)  # torch itself has this form for other devices only
        else:
            ran.append(form)
    note = f"; torch refuses {', '.join(refused)} on CUDA" if refused else ""
    return ", ".join(ran) + note


_KINDS = sorted(
    name
    for name, kind in vars(torch.optim).items()
    if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer) and name != "Optimizer"
)
for _name in _KINDS:
    add(
        Item(
            area="Optimizers",
            name=_name,
            what="2 steps in " + ", ".join(_forms(getattr(torch.optim, _name))),
            run=partial(_run, _name),
            key=f"optimizer_{_name.lower()}",
        )
    )
