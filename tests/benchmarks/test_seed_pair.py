"""The prediction for the field's pair of cards is arithmetic that holds against what the field has published."""

from pathlib import Path

import pytest
import seed_pair
from seed_pair import ADA, LAYERS, PASCAL, READ_SHARE, Stage

REPO = Path(__file__).parents[2]
EVEN = (Stage(PASCAL, 0, 12), Stage(ADA, 12, LAYERS))


def test_the_bytes_are_those_of_the_field() -> None:
    """C-08: 7,208 + 7,450 MiB reported, buffers included; weights of about 10.8 GiB, a cache of 3.0 GiB."""
    total = sum(stage.memory_bytes() for stage in EVEN) / 2**20
    assert total == pytest.approx(7208 + 7450, rel=0.05)
    cache = sum(seed_pair.kv_bytes(layer, seed_pair.CONTEXT) for layer in range(LAYERS)) / 2**30
    assert cache == pytest.approx(3.0, rel=0.02)
    assert total / 2**10 - cache == pytest.approx(10.8, rel=0.02)


def test_a_hop_carries_what_it_must() -> None:
    """C-06: 11,520 bytes for a token of width 2,880."""
    wire_s = seed_pair.hop_s(1) - seed_pair.hop_s(0)
    assert wire_s * seed_pair.LINK_BYTES_PER_S == pytest.approx(11520)


def test_a_token_is_bound_by_the_cards() -> None:
    """C-09, C-11: more bandwidth helps, more context costs, and both are beyond what was measured of the peer."""
    at_share = seed_pair.token_s(EVEN, 2048, READ_SHARE)
    bound = seed_pair.token_s(EVEN, 2048, 1.0)
    assert bound < at_share < seed_pair.token_s(EVEN, 65536, READ_SHARE)
    assert 1 / at_share > 49.95
    link_s = at_share - sum(stage.token_s(2048, READ_SHARE) for stage in EVEN)
    assert link_s < 0.15 * at_share


def test_the_document_has_these_figures() -> None:
    """What docs/performance.md says is what the script says."""
    text = (REPO / "docs/performance.md").read_text()
    for figure, value in seed_pair.prediction():
        assert f"| {figure} | {value} |" in text
