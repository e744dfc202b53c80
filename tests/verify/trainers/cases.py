"""What is known of each trainer: its script, its word, and what is found."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One way to train over uneven tokens."""

    title: str
    package: str
    script: str
    word: str
    codes: tuple[str, ...]

    @property
    def path(self) -> Path:
        """The script."""
        return Path(__file__).parent / self.script


CASES = (
    Case(
        title="Transformers' Trainer, a model that takes `num_items_in_batch`",
        package="transformers",
        script="transformers_trainer.py",
        word="counted",
        codes=("MF209",),
    ),
    Case(
        title="Transformers' Trainer, a model that does not",
        package="transformers",
        script="transformers_trainer.py",
        word="uncounted",
        codes=("MF201",),
    ),
    Case(
        title="Accelerate, `accelerator.accumulate` and a mean loss",
        package="accelerate",
        script="accelerate_loop.py",
        word="mean",
        codes=("MF201",),
    ),
    Case(
        title="Accelerate, the sum over the tokens of the whole group",
        package="accelerate",
        script="accelerate_loop.py",
        word="counted",
        codes=(),
    ),
)
