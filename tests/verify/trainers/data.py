"""Sequences of very different lengths, so that microbatches have very different token counts."""

from __future__ import annotations

from typing import Any

import torch

LENGTHS = (4, 6, 60, 64, 8, 5, 50, 62, 3, 7, 61, 55, 6, 4, 58, 63)
LONGEST = 64
VOCABULARY = 101


def examples() -> list[dict[str, Any]]:
    """Make one padded sequence for each length; labels of padding are ignored."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for length in LENGTHS:
        ids = torch.randint(VOCABULARY, (LONGEST,), generator=generator)
        mask = (torch.arange(LONGEST) < length).long()
        labels = torch.where(mask.bool(), ids, -100)
        made.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    return made
