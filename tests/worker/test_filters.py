"""Each sampling parameter: its effect, its neutral value, its place in the order (B-30 .. B-33, B-35)."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from lamina.rpc_worker import filters
from lamina.spec.errors import InvalidRequest
from lamina.spec.sampling import SamplingParams

Logits = NDArray[np.float32]
GRID = (np.arange(400) + 0.5) / 400


def logits_of(*probabilities: float) -> Logits:
    """Logits whose softmax these are."""
    return np.log(np.asarray(probabilities)).astype(np.float32)


def possible(logits: Logits, **params: Any) -> dict[int, float]:
    """Tokens that can be drawn, with the share of [0, 1) that draws each."""
    drawn = [filters.draw(logits, SamplingParams(**({"temperature": 1.0} | params)), u) for u in GRID]
    tokens, counts = np.unique(drawn, return_counts=True)
    return dict(zip(tokens.tolist(), (counts / len(GRID)).tolist(), strict=True))


FIVE = logits_of(0.1, 0.4, 0.05, 0.3, 0.15)  # by likelihood: 1, 3, 4, 0, 2


def near(expected: Mapping[int, float]) -> dict[int, Any]:
    return {token: pytest.approx(share, abs=3e-3) for token, share in expected.items()}


def test_neutral_values_change_nothing() -> None:
    """B-30: every default leaves the softmax as it is."""
    assert possible(FIVE) == near({0: 0.1, 1: 0.4, 2: 0.05, 3: 0.3, 4: 0.15})
    neutral = {
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "typical_p": 1.0,
        "top_n_sigma": 0.0,
    }
    assert possible(FIVE, **neutral) == possible(FIVE)


def renormalised(*tokens: int) -> dict[int, Any]:
    values = np.exp(FIVE.astype(np.float64))
    return near({token: values[token] / values[list(tokens)].sum() for token in tokens})


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"top_k": 1}, (1,)),
        ({"top_k": 3}, (1, 3, 4)),
        ({"top_k": 99}, (0, 1, 2, 3, 4)),
        ({"top_p": 0.39}, (1,)),
        ({"top_p": 0.41}, (1, 3)),
        ({"top_p": 0.69}, (1, 3)),
        ({"top_p": 0.71}, (1, 3, 4)),
        ({"top_p": 1e-6}, (1,)),
        ({"min_p": 0.74}, (1, 3)),
        ({"min_p": 0.76}, (1,)),
        ({"min_p": 1.0}, (1,)),
        ({"min_p": 0.124}, (0, 1, 2, 3, 4)),
        ({"typical_p": 1e-6}, (3,)),
        ({"typical_p": 0.5}, (1, 3)),
    ],
    ids=str,
)
def test_what_is_kept(params: dict[str, Any], kept: tuple[int, ...]) -> None:
    """B-30: each alone. The entropy is 1.39 nats: token 3 (surprise 1.20) is the most typical, then 1 (0.92)."""
    assert possible(FIVE, **params) == renormalised(*kept)


def test_temperature() -> None:
    """Shares are p ** (1 / T), renormalised; a tiny temperature is greedy, and none divides by zero (B-32)."""
    values = np.array([0.1, 0.4, 0.05, 0.3, 0.15])
    for temperature in (0.5, 2.0):
        powers = values ** (1 / temperature)
        assert possible(FIVE, temperature=temperature) == near(dict(enumerate(powers / powers.sum())))
    assert possible(FIVE, temperature=1e-30) == {1: 1.0}
    assert possible(FIVE, temperature=float("inf")) == near(dict.fromkeys(range(5), 0.2))


def test_top_n_sigma_by_hand() -> None:
    """B-33: logits 0, 2, 4, 10 have sigma sqrt(14) = 3.742 about their mean 4, so max - 1.7 sigma = 3.64 keeps two;
    mean - 1.7 sigma would keep all four."""
    logits = np.array([4.0, 0.0, 10.0, 2.0], np.float32)
    for n, kept in ((0.5, {2}), (1.6, {2}), (1.7, {0, 2}), (2.2, {0, 2, 3}), (2.7, {0, 1, 2, 3})):
        assert set(possible(logits, top_n_sigma=n, temperature=1e6)) == kept


def test_top_n_sigma_ignores_masked_tokens() -> None:
    """Sigma is over the finite logits, here 3.4: a grammar's mask must not make it infinite."""
    logits = np.array([4.0, -np.inf, 10.0, 2.0], np.float32)
    assert set(possible(logits, top_n_sigma=2.0, temperature=1e6)) == {0, 2}


def test_sigma_is_taken_before_temperature() -> None:
    """B-31: were the temperature first, max - n sigma would keep the same set at any temperature only by luck: both
    scale alike, but top_k and min_p come after it."""
    assert set(possible(FIVE, top_n_sigma=1.0, temperature=0.2, min_p=0.01)) == {1, 3}
    assert set(possible(FIVE, top_n_sigma=1.0, temperature=5.0, min_p=0.99)) == {1}


def test_temperature_comes_before_min_p() -> None:
    """B-31: 0.3 / 0.4 is 0.75, at temperature 2 it is 0.87: min_p 0.8 keeps token 3 only in this order."""
    assert set(possible(FIVE, min_p=0.8)) == {1}
    assert set(possible(FIVE, min_p=0.8, temperature=2.0)) == {1, 3}


def test_temperature_comes_before_top_p() -> None:
    """At temperature 2 the first two have 0.5 of the mass, not 0.7."""
    assert set(possible(FIVE, top_p=0.65)) == {1, 3}
    assert set(possible(FIVE, top_p=0.65, temperature=2.0)) == {1, 3, 4}


def test_top_k_comes_before_top_p() -> None:
    """B-31: of three tokens 0.4 / 0.85 = 0.47 of the mass is the first's, so top_p 0.45 keeps it alone."""
    assert set(possible(FIVE, top_p=0.45)) == {1, 3}
    assert set(possible(FIVE, top_p=0.45, top_k=3)) == {1}


def test_min_p_comes_before_top_p() -> None:
    """Of the two that min_p leaves, the first has 0.57 of the mass."""
    assert set(possible(FIVE, top_p=0.55)) == {1, 3}
    assert set(possible(FIVE, top_p=0.55, min_p=0.5)) == {1}


def test_ties_go_to_the_first() -> None:
    """B-35: equal logits are taken by id wherever a filter must choose among them."""
    flat = np.zeros(7, np.float32)
    assert set(possible(flat, top_k=3)) == {0, 1, 2}
    assert set(possible(flat, top_p=0.4)) == {0, 1, 2}
    mixed = np.array([1, 2, 2, 2, 0], np.float32)
    assert set(possible(mixed, top_k=2)) == {1, 2}
    assert filters.draw(flat, SamplingParams(temperature=1.0), 0.0) == 0


def test_masked_tokens_are_never_drawn() -> None:
    logits = FIVE.copy()
    logits[[1, 3]] = -np.inf
    assert set(possible(logits)) == {0, 2, 4}
    assert set(possible(logits, top_k=4)) == {0, 2, 4}
    assert filters.draw(logits, SamplingParams(temperature=1.0), 1 - 2**-53) == 4


@given(st.integers(0, 2**32 - 1), st.floats(1e-3, 1, exclude_max=True), st.sampled_from([0.5, 3.0, 10.0]))
def test_top_p_of_a_large_vocabulary(seed: int, top_p: float, spread: float) -> None:
    """However many tokens it takes, the set is the one that sorting everything gives, ties by id."""
    rng = np.random.default_rng(seed)
    logits = np.round(rng.normal(0, spread, 3000), 1).astype(np.float32)
    exact = np.exp(logits.astype(np.float64) - logits.max())
    exact /= exact.sum()
    order = sorted(range(3000), key=lambda i: (-logits[i], i))
    count = int(np.searchsorted(np.cumsum(exact[order]), top_p)) + 1
    kept = sorted(order[:count])
    for uniform in (0.0, 0.3, 0.7, 1 - 2**-53):
        cumulative = np.cumsum(exact[kept])
        place = int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))
        expected = kept[min(place, count - 1)]
        assert filters.draw(logits, SamplingParams(temperature=1.0, top_p=top_p), uniform) == expected


@given(
    st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=40),
    st.floats(0, 1, exclude_max=True),
    st.fixed_dictionaries(
        {
            "temperature": st.sampled_from([1e-9, 0.3, 1.0, 100.0]),
            "top_k": st.integers(0, 50),
            "top_p": st.floats(1e-6, 1),
            "min_p": st.floats(0, 1),
            "typical_p": st.floats(1e-6, 1),
            "top_n_sigma": st.floats(0, 5),
        }
    ),
)
def test_something_is_always_left(values: list[float], uniform: float, params: dict[str, Any]) -> None:
    """Any combination yields a token; with top_n_sigma alone or top_k = 1 it is among the best."""
    logits = np.array(values, np.float32)
    token = filters.draw(logits, SamplingParams(**params), uniform)
    assert 0 <= token < len(values)
    if params["top_k"] == 1:
        assert token == int(logits.argmax())


def penalised(history: list[int], num_generated: int, logits: Logits, **params: Any) -> list[float]:
    out = logits.copy()
    filters.apply_penalties(out, history, num_generated, SamplingParams(**params))
    return [round(float(value), 5) for value in out]


PLAIN = np.array([2.0, -2.0, 1.0, 0.0, 4.0], np.float32)
HISTORY = [0, 1, 1, 4, 4, 4]  # the last three are output


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, [2, -2, 1, 0, 4]),
        ({"repetition_penalty": 2.0}, [1, -4, 1, 0, 2]),
        ({"repetition_penalty": 0.5}, [4, -1, 1, 0, 8]),
        ({"repetition_penalty": 2.0, "penalty_window": 3}, [2, -2, 1, 0, 2]),
        ({"repetition_penalty": 2.0, "penalty_window": 4}, [2, -4, 1, 0, 2]),
        ({"repetition_penalty": 2.0, "penalty_window": 0}, [2, -2, 1, 0, 4]),
        ({"repetition_penalty": 2.0, "penalty_window": 99}, [1, -4, 1, 0, 2]),
        ({"presence_penalty": 0.5}, [2, -2, 1, 0, 3.5]),
        ({"presence_penalty": -0.5}, [2, -2, 1, 0, 4.5]),
        ({"frequency_penalty": 0.5}, [2, -2, 1, 0, 2.5]),
        ({"frequency_penalty": 0.5, "penalty_window": 2}, [2, -2, 1, 0, 3]),
        ({"frequency_penalty": 0.5, "presence_penalty": 0.25}, [2, -2, 1, 0, 2.25]),
        ({"repetition_penalty": 2.0, "presence_penalty": 1.0}, [1, -4, 1, 0, 1]),
    ],
    ids=str,
)
def test_penalties(params: dict[str, Any], expected: list[float]) -> None:
    """Repetition over prompt and output, presence and frequency over output, both within the window (B-30)."""
    assert penalised(HISTORY, 3, PLAIN, **params) == expected


def test_penalties_of_the_first_token() -> None:
    """Nothing is generated yet: the prompt counts for repetition only."""
    assert penalised([0, 0], 0, PLAIN, presence_penalty=1.0, frequency_penalty=1.0) == PLAIN.tolist()
    assert penalised([0, 0], 0, PLAIN, repetition_penalty=2.0) == [1, -2, 1, 0, 4]
    assert penalised([], 0, PLAIN, repetition_penalty=2.0) == PLAIN.tolist()


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_a_repetition_penalty_that_would_divide_by_zero(value: float) -> None:
    """B-32."""
    with pytest.raises(InvalidRequest, match="repetition_penalty must be in"):
        SamplingParams(repetition_penalty=value)


@given(st.integers(0, 2**32 - 1))
def test_logprobs_are_those_of_more_digits(seed: int) -> None:
    """Of the raw logits, whatever the filters did; the top ones in order, ties by id."""
    rng = np.random.default_rng(seed)
    raw = rng.normal(0, 20, 50).astype(np.float32)
    raw[rng.integers(0, 50, 5)] = raw[7]
    exact = raw.astype(np.longdouble)
    exact = exact - exact.max() - np.log(np.exp(exact - exact.max()).sum())
    token = int(rng.integers(50))
    value, top = filters.logprobs(raw, token, 8)
    assert value == pytest.approx(float(exact[token]), abs=1e-6, rel=1e-6)
    order = sorted(range(50), key=lambda i: (-raw[i], i))[:8]
    assert [i for i, _ in top] == order
    assert [p for _, p in top] == pytest.approx([float(exact[i]) for i in order], abs=1e-6, rel=1e-6)
    assert filters.logprobs(raw, token, 0) == (value, ())


def test_logprobs_beside_masked_tokens() -> None:
    raw = np.array([-np.inf, 1.0, 1.0], np.float32)
    value, top = filters.logprobs(raw, 1, 3)
    assert value == pytest.approx(np.log(0.5))
    assert [i for i, _ in top] == [1, 2]
