"""The card's generator on the CPU gives the numbers that real cards printed."""

from __future__ import annotations

import numpy as np
import pytest

from tests.accuracy.models import mixture
from tests.accuracy.models.philox import Generator

# `torch.manual_seed(42); torch.randn(2, 5, device="cuda")`, in flashinfer's page of LogitsPipe.
SEED_42 = (0.1940, 2.1614, -0.1721, 0.8491, -1.9244, 0.6530, -0.6494, -0.8175, 0.5280, -1.2753)
# `torch.manual_seed(0)`, then `torch.randn` on a card, printed in a public note on fused kernels.
SEED_0 = (-0.9247, -0.4253, -2.6438, 0.1452, -0.1209, -0.5797, -0.6229, -0.3284)


@pytest.mark.parametrize(("seed", "printed"), [(42, SEED_42), (0, SEED_0)])
def test_normal_numbers_are_those_that_cards_print(seed, printed):
    found = Generator(seed, sms=108).randn(len(printed))

    assert [f"{value:.4f}" for value in found] == [f"{value:.4f}" for value in printed]


def test_a_tensor_that_was_filled_before_moves_the_numbers():
    generator = Generator(42, sms=108)
    generator.skip(10)

    assert not np.allclose(generator.randn(10), Generator(42, sms=108).randn(10))


def test_skipping_is_filling_and_forgetting():
    skipped, filled = Generator(1, sms=132), Generator(1, sms=132)
    skipped.skip(3_000_000)
    filled.randn(3_000_000)

    assert np.array_equal(skipped.randn(100), filled.randn(100))


def test_small_integers_stay_below_their_limit():
    assert set(Generator(0, sms=132).randint(2, 1000).tolist()) == {0, 1}


def test_every_token_goes_to_as_many_experts_as_the_script_asks():
    config = {"T": 128, "E": 16, "H": 64, "intermediate_dim": 32, "K": 4}

    assert sum(mixture.routed(config)) == 128 * 4
