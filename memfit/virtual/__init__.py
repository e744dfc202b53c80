"""The virtual GPU: PyTorch's CUDA build and its real allocator over a driver without kernels."""

from memfit.virtual.build import unavailable_reason
from memfit.virtual.catalogue import DEFAULT_CARD, Card, cards, context_charge, find_card
from memfit.virtual.environment import CARD_VARIABLE, prepare, shared_by

__all__ = [
    "CARD_VARIABLE",
    "DEFAULT_CARD",
    "Card",
    "cards",
    "context_charge",
    "find_card",
    "prepare",
    "shared_by",
    "unavailable_reason",
]
