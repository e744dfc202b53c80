"""Random questions for a probe: workloads, optimizers, precisions, allocators and cards.

Question `index` of a seed is always the same one. The size of the card is drawn last, so that most
answers lie between one and a few hundred examples, where the search has something to find.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

from memfit import virtual
from memfit.records import Parameter, Policy, Precision
from memfit.units import GIB, MIB

KINDS = ("mlp", "transformer", "cnn", "rnn")
UPDATES = (
    "sgd", "momentum", "momentum foreach", "adam fused", "adam loop", "adamw", "adamw foreach",
    "adamw fused", "adamw capturable", "amsgrad", "adafactor", "rmsprop", "nadam", "adagrad",
)  # fmt: skip
ALLOCATORS = (
    "",
    "expandable_segments:True",
    "max_split_size_mb:64",
    "max_split_size_mb:512",
    "garbage_collection_threshold:0.6",
    "roundup_power2_divisions:8",
    "max_split_size_mb:256,garbage_collection_threshold:0.8",
)
CARDS = ("rtx-4060", "rtx-3090", "a100-80gb", "h100-80gb")
LEAST_BYTES = 2 * GIB
TARGET = "tests.benchmarks.workloads.drawn:Drawn"


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One drawn question."""

    index: int
    parameters: Mapping[str, Parameter]
    precision: Precision
    clip_norm: float | None
    logical_batch: int | None
    policy: Policy
    replicas: int
    card: str
    memory: str
    allocator: str
    """Value of `PYTORCH_CUDA_ALLOC_CONF`; empty for the allocator's defaults."""

    @property
    def title(self) -> str:
        """Say the workload in a few words."""
        p = self.parameters
        words = [f"{p['kind']} {p['depth']}x{p['width']}, {p['length']} long"]
        words.append(str(p["update"]))
        words.append(self.precision.value + (" on bf16 weights" if p["half_weights"] else ""))
        words += ["checkpointed"] * bool(p["checkpointed"])
        words += ["clipped"] * (self.clip_norm is not None)
        return ", ".join(words)


def draw(seed: int, index: int) -> Question:
    """Draw question `index` of a seed."""
    dice = random.Random(f"{seed}/{index}")
    kind = dice.choice(KINDS)
    width = 64 * round(2 ** dice.uniform(0, 4 if kind != "cnn" else 2))
    length = {
        "mlp": lambda: dice.choice((1, 16, 64, 200)),
        "transformer": lambda: dice.choice((32, 100, 128, 256, 500, 512)),
        "cnn": lambda: dice.choice((16, 28, 32, 48, 64)),
        "rnn": lambda: dice.choice((16, 50, 64, 100)),
    }[kind]()
    precision = dice.choice(tuple(Precision))
    parameters: dict[str, Parameter] = {
        "kind": kind,
        "depth": dice.randint(1, 12 if kind != "rnn" else 4),
        "width": width,
        "length": length,
        "classes": dice.choice((10, 1000, 8192, 32000)),
        "dropout": dice.choice((0.0, 0.1)),
        "even": dice.random() < 0.5,
        "checkpointed": kind != "rnn" and dice.random() < 0.3,
        "half_weights": precision is Precision.BF16 and dice.random() < 0.3,
        "update": dice.choice(UPDATES),
    }
    replicas = dice.choice((1, 1, 1, 2, 4))
    card = dice.choice(CARDS)
    resident, example = _guess(parameters)
    total = int(resident + 2 ** dice.uniform(0, 8) * example)
    total = min(max(total, LEAST_BYTES), virtual.find_card(card).total_bytes)
    logical_batch = None
    if dice.random() < 0.7:
        room = max(1.0, (total - resident) / example)
        examples = max(1, round(room * 2 ** dice.uniform(-0.5, 3.5)))
        if examples > 256 or dice.random() < 0.5:
            examples = -(-examples // 12) * 12
        logical_batch = replicas * examples
    return Question(
        index=index,
        parameters=parameters,
        precision=precision,
        clip_norm=dice.choice((None, None, 1.0)),
        logical_batch=logical_batch,
        policy=dice.choice(tuple(Policy)),
        replicas=replicas,
        card=card,
        memory=f"{total // MIB}MiB",
        allocator=dice.choice(ALLOCATORS),
    )


def _guess(parameters: Mapping[str, Parameter]) -> tuple[float, float]:
    """Guess what is there without examples, and what each takes; no more than hints for a draw."""
    values = {name: int(parameters[name]) for name in ("depth", "width", "length", "classes")}  # type: ignore[arg-type]
    depth, width, length, classes = values.values()
    kind = str(parameters["kind"])
    positions = length * length if kind == "cnn" else length
    per_layer = {"mlp": 4, "transformer": 20, "cnn": 4, "rnn": 12}[kind]
    layers = 1.5 if kind == "cnn" else depth
    if parameters["checkpointed"]:
        layers = 1 + depth / per_layer
    logits = classes * (1 if kind == "cnn" else length) * 3
    example = 4 * (positions * width * per_layer * layers + logits)
    weights = depth * width * width * {"mlp": 1, "transformer": 12, "cnn": 9, "rnn": 8}[kind]
    return GIB / 2 + 16 * (weights + 2 * classes * width), example
