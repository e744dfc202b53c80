"""The catalogue of cards."""

from __future__ import annotations

import pytest

from memfit.errors import UsageError
from memfit.virtual import DEFAULT_CARD, cards, context_charge, find_card


@pytest.mark.parametrize(
    "name",
    ["rtx-4090", "RTX 4090", "rtx4090", "4090", "NVIDIA GeForce RTX 4090", "nvidia-rtx_4090"],
)
def test_case_spaces_dashes_and_brands_make_no_difference(name):
    assert find_card(name).slug == "rtx-4090"


@pytest.mark.parametrize(
    ("alias", "slug"),
    [("h100", "h100-80gb"), ("a100", "a100-40gb"), ("v100", "v100-16gb"), ("Tesla T4", "t4")],
)
def test_an_alias_finds_its_card(alias, slug):
    assert find_card(alias).slug == slug


def test_an_unknown_name_is_refused_with_the_nearest_cards():
    with pytest.raises(UsageError, match="rtx 4091") as caught:
        find_card("rtx 4091")
    assert caught.value.hint is not None
    assert "rtx-4090" in caught.value.hint


def test_a_name_like_no_other_points_to_the_list():
    with pytest.raises(UsageError) as caught:
        find_card("quux")
    assert caught.value.hint == "`memfit gpus` lists the cards"


def test_every_card_is_found_by_its_slug_its_name_and_its_aliases():
    for card in cards():
        for name in (card.slug, card.name, *card.aliases):
            assert find_card(name) is card


def test_every_card_has_plausible_figures_and_a_source():
    for card in cards():
        context, words = context_charge(card)
        assert 0 < context < card.total_bytes // 8
        assert words
        assert card.source
        assert card.smem_optin_bytes <= card.smem_per_sm_bytes
        assert (7, 0) <= card.capability <= (12, 1)


def test_slugs_are_unique_and_the_default_is_among_them():
    slugs = [card.slug for card in cards()]
    assert len(slugs) == len(set(slugs))
    assert DEFAULT_CARD in slugs


def test_a_context_that_nobody_read_is_called_an_estimate():
    assert "estimate" in context_charge(find_card("rtx-4090"))[1]


def test_a_context_that_was_read_is_not_called_an_estimate():
    size, words = context_charge(find_card("rtx-6000-ada"))
    assert size == 426 * 2**20
    assert "estimate" not in words
