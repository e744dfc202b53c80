"""The cards that a virtual GPU can stand in for.

The figures are in `cards.csv`, each row with its source. A card's total is what CUDA reports, which
is less than the size on the box, and depends on the driver: the catalogue takes the newest Linux
reading that was found, and names others beside it. Newer drivers keep 100 to 190 MiB more of the
GeForce and GDDR cards; ECC takes about 6 % of a GDDR card; Windows shows nearly the whole board.
"""

from __future__ import annotations

import csv
import difflib
import re
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Final

from memfit.errors import UsageError
from memfit.units import MIB, format_bytes

DEFAULT_CARD: Final = "rtx-4090"
"""The card that stands in where the user names none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One card, as its driver describes it."""

    name: str
    """CUDA's name."""
    slug: str
    """Short name for the command line and for files."""
    aliases: tuple[str, ...]
    total_bytes: int
    """Total memory, as CUDA reports it."""
    compute_capability: str
    """Such as `8.9`."""
    sms: int
    """Streaming multiprocessors."""
    smem_per_sm_bytes: int
    smem_optin_bytes: int
    """The most shared memory that one block may ask for."""
    l2_bytes: int
    context_bytes: int | None
    """Memory that a CUDA context takes, where it was read from a card; else None."""
    source: str
    """Where the figures come from."""

    @property
    def capability(self) -> tuple[int, int]:
        """The compute capability as two numbers."""
        major, minor = self.compute_capability.split(".")
        return int(major), int(minor)


@cache
def cards() -> tuple[Card, ...]:
    """Return all cards, in the catalogue's order."""
    text = resources.files("memfit.virtual").joinpath("cards.csv").read_text("utf-8")
    return tuple(_card(row) for row in csv.DictReader(text.splitlines()))


def _card(row: dict[str, str]) -> Card:
    return Card(
        name=row["name"],
        slug=row["slug"],
        aliases=tuple(row["aliases"].split("|")) if row["aliases"] else (),
        total_bytes=int(row["total_bytes"]),
        compute_capability=row["compute_capability"],
        sms=int(row["sms"]),
        smem_per_sm_bytes=int(row["smem_per_sm_bytes"]),
        smem_optin_bytes=int(row["smem_optin_bytes"]),
        l2_bytes=int(row["l2_bytes"]),
        context_bytes=int(row["context_bytes"]) if row["context_bytes"] else None,
        source=row["source"],
    )


def _plain(name: str) -> str:
    """Reduce a name to what people agree on: no case, spaces, dashes, brands."""
    return re.sub(r"nvidia|geforce|tesla|virtual|[^a-z0-9]", "", name.lower())


@cache
def _by_name() -> dict[str, Card]:
    return {
        _plain(word): card for card in cards() for word in (card.slug, card.name, *card.aliases)
    }


def find_card(name: str) -> Card:
    """Return the card of a name, a slug or an alias.

    Case, spaces, dashes and the words NVIDIA, GeForce and Tesla make no difference.

    Raises:
        UsageError: When no card has that name.
    """
    found = _by_name().get(_plain(name))
    if found is not None:
        return found
    near = difflib.get_close_matches(_plain(name), _by_name(), n=6, cutoff=0.5)
    slugs = list(dict.fromkeys(_by_name()[word].slug for word in near))[:3]
    hint = f"did you mean {' or '.join(slugs)}?" if slugs else "`memfit gpus` lists the cards"
    raise UsageError(f"there is no virtual GPU named {name!r}", hint=hint)


def context_charge(card: Card) -> tuple[int, str]:
    """Return the bytes charged for the CUDA context, and where the figure comes from.

    A context read from a card is a floor: it grows as kernels are loaded.
    """
    if card.context_bytes is not None:
        size = format_bytes(card.context_bytes)
        return card.context_bytes, f"{size}, read from a card of this kind with few kernels loaded"
    mib = _estimated_context_mib(card)
    return mib * MIB, (
        f"{mib} MiB, an estimate from cards of similar size and generation; "
        "no reading of this card's context was found"
    )


def _estimated_context_mib(card: Card) -> int:
    """Estimate a context from the cards that were read: it grows with multiprocessors."""
    major, _ = card.capability
    if major >= 10:  # noqa: PLR2004
        return 650
    if major == 9:  # noqa: PLR2004
        return 550
    if card.sms <= 46:  # noqa: PLR2004
        return 300
    if card.sms <= 84:  # noqa: PLR2004
        return 400
    return 460
