"""The sampler: who gets which token, when a sequence ends, and on what its random numbers depend."""

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from lamina.kernels import ops
from lamina.kernels.buffer import DType, Extent, StepShape
from lamina.kernels.registry import create_backend
from lamina.rpc_worker.sampler import Sampler, best_tokens, uniforms
from lamina.spec.errors import InvalidPlan
from lamina.spec.ids import SeqId
from lamina.spec.memory import NUM_SAMPLING_PARAMS
from lamina.spec.sampling import SamplingParams
from lamina.spec.step import AddSequence, FinishReason, SampledToken

Logits = NDArray[np.float32]
VOCAB = 8


def addition(seq: int, sampling: SamplingParams | None = None, **changes: object) -> AddSequence:
    fields: dict[str, object] = {
        "seq": SeqId(seq),
        "sampling": sampling or SamplingParams(),
        "history_ids": (1, 2),
        "stop_ids": frozenset({7}),
        "max_tokens": 100,
    }
    return AddSequence(**(fields | changes))  # type: ignore[arg-type]


def sampler_with(*additions: AddSequence) -> Sampler:
    sampler = Sampler(VOCAB)
    for add in additions:
        sampler.add(add)
    return sampler


def rows(*best: int) -> Logits:
    """One row for each: its best token has logit 3, the others 0."""
    logits = np.zeros((len(best), VOCAB), np.float32)
    logits[np.arange(len(best)), best] = 3.0
    return logits


def sample(sampler: Sampler, seqs: Sequence[int], logits: Logits, pos: int = 2) -> tuple[SampledToken, ...]:
    return sampler.sample([(SeqId(seq), pos) for seq in seqs], logits)


def test_greedy_takes_the_first_of_the_best() -> None:
    """B-35."""
    logits = np.array([[0, 5, 5, 1, 0, 0, 0, 0], [2] * 8], np.float32)
    assert [t.token for t in sample(sampler_with(addition(0), addition(1)), (0, 1), logits)] == [1, 0]


def test_masked_logits_are_no_error() -> None:
    logits = rows(4)
    logits[0, :4] = -np.inf
    assert sample(sampler_with(addition(0)), (0,), logits)[0].token == 4


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "bad",
    [
        [np.nan] * VOCAB,
        [0, np.nan, 9, 0, 0, 0, 0, 0],
        [np.nan, 9, 0, 0, 0, 0, 0, 0],
        [-np.inf] * VOCAB,
        [0, np.inf, 0, 0, 0, 0, 0, 0],
        [0, np.nan, np.inf, 0, 0, 0, 0, 0],
    ],
    ids=["all nan", "one nan", "nan first", "all -inf", "inf", "nan and inf"],
)
def test_what_is_not_finite_ends_its_own_sequence(bad: list[float], temperature: float) -> None:
    """A-05, B-35: an error for that sequence alone, never token 0 as if it had been chosen."""
    params = SamplingParams(temperature=temperature, top_k=1)
    sampler = sampler_with(*(addition(seq, params) for seq in range(3)))
    logits = rows(3, 3, 3)
    logits[1] = bad
    first, broken, last = sample(sampler, (0, 1, 2), logits)
    assert (first.token, last.token) == (3, 3)
    assert first.finish is last.finish is None
    assert broken.finish is FinishReason.ERROR
    assert broken.error == "NumericalError: the logits for position 2 are not finite"
    again = sample(sampler, (0, 1, 2), rows(3, 3, 3), pos=3)
    assert [t.finish for t in again] == [None, None, None]
    assert again[1].token == 0, "it has ended; nobody uses this"


def test_the_devices_argmax_is_taken_without_fetching_logits() -> None:
    """-1 is a row that is not finite."""
    sampler = sampler_with(addition(0), addition(1))
    tokens = sampler.sample(
        [(SeqId(0), 2), (SeqId(1), 2)], lambda _: pytest.fail("logits were fetched"), np.array([5, -1], np.int32)
    )
    assert (tokens[0].token, tokens[1].finish) == (5, FinishReason.ERROR)


def test_logits_are_fetched_of_rows_that_need_them_alone() -> None:
    """A sequence that has ended needs none."""
    biased = SamplingParams(logit_bias={6: 50.0})
    sampler = sampler_with(addition(0), addition(1, biased), addition(2), addition(3, biased, max_tokens=1))
    asked = []

    def fetch(wanted: list[int]) -> Logits:
        asked.append(wanted)
        return rows(5, 5, 5, 5)[wanted]

    for pos in (2, 3):
        tokens = sampler.sample([(SeqId(seq), pos) for seq in range(4)], fetch, np.array([5, 5, 4, 5], np.int32))
        assert [t.token for t in tokens] == [5, 6, 4, 6 if pos == 2 else 0]
    assert asked == [[1, 3], [1]]


def test_best_tokens_of_the_host() -> None:
    logits = rows(2, 3, 4)
    logits[1, 0], logits[2, 0] = np.nan, -np.inf
    assert best_tokens(logits).tolist() == [2, -1, 4]


def test_a_sequence_that_was_never_added() -> None:
    """The contract is broken: an error for that row, not token 0."""
    (token,) = sample(sampler_with(), (9,), rows(3))
    assert token.finish is FinishReason.ERROR
    assert token.error == "InvalidPlan: sequence 9 was not added before its first step"


def test_stop_ids_and_max_tokens() -> None:
    """The stop token is given with STOP; the last allowed one with LENGTH; STOP wins; afterwards 0."""
    sampler = sampler_with(addition(0, max_tokens=3), addition(1, max_tokens=1), addition(2, max_tokens=1))
    first = sample(sampler, (0, 1, 2), rows(4, 4, 7))
    assert [(t.token, t.finish) for t in first] == [(4, None), (4, FinishReason.LENGTH), (7, FinishReason.STOP)]
    second = sample(sampler, (0, 1, 2), rows(4, 4, 4), pos=3)
    assert [(t.token, t.finish) for t in second] == [(4, None), (0, None), (0, None)]
    assert sample(sampler, (0,), rows(4), pos=4)[0].finish is FinishReason.LENGTH


def test_max_tokens_counts_what_was_generated_before_a_replan() -> None:
    sampler = sampler_with(addition(0, history_ids=(1, 2, 4, 4), num_generated=2, max_tokens=3))
    assert sample(sampler, (0,), rows(4), pos=4)[0].finish is FinishReason.LENGTH


def test_penalties_apply_at_temperature_zero() -> None:
    """B-32: token 4 leads 5 by 1.5 and the rest by 3; one taken falls by 1. At 0 all tie: the first."""
    sampler = sampler_with(addition(0, SamplingParams(frequency_penalty=1.0)))
    logits = rows(4)
    logits[0, 5] = 1.5
    found = [sample(sampler, (0,), logits, pos=pos)[0].token for pos in range(2, 8)]
    assert found == [4, 4, 5, 4, 5, 0]


def test_logit_bias() -> None:
    """Added before the choice; ids outside the vocabulary have no effect."""
    sampler = sampler_with(addition(0, SamplingParams(logit_bias={6: 3.5, 4: -100.0, 2**31: 100.0})))
    assert sample(sampler, (0,), rows(4))[0].token == 6


def test_a_bias_that_overflows_is_no_token() -> None:
    """B-35: what became infinite on the way is an error as well."""
    sampler = sampler_with(addition(0, SamplingParams(temperature=1.0, repetition_penalty=1e-4), history_ids=(4,)))
    (token,) = sample(sampler, (0,), 1e36 * rows(4))
    assert token.finish is FinishReason.ERROR
    assert token.error.startswith("NumericalError: bias, penalties or the grammar leave no token")


def test_logprobs_are_of_the_raw_logits() -> None:
    """Bias and temperature change the choice, not the reported distribution."""
    params = SamplingParams(temperature=0.0, logit_bias={6: 50.0}, num_logprobs=2)
    (token,) = sample(sampler_with(addition(0, params)), (0,), rows(4))
    total = np.log(np.exp(3.0) + 7)
    assert token.token == 6
    assert token.logprob == pytest.approx(-total)
    assert token.top_logprobs == ((4, pytest.approx(3 - total)), (0, pytest.approx(-total)))
    plain = sampler_with(addition(0, SamplingParams(num_logprobs=0)))
    assert sample(plain, (0,), rows(4))[0].logprob == pytest.approx(3 - total)


def test_impossible_additions() -> None:
    sampler = sampler_with(addition(0))
    with pytest.raises(InvalidPlan, match="sequence 0 was added before"):
        sampler.add(addition(0))
    with pytest.raises(InvalidPlan, match="outside the vocabulary of 8"):
        sampler.add(addition(1, history_ids=(1, 8)))
    sampler.remove(SeqId(0))
    sampler.remove(SeqId(0))
    sampler.add(addition(0))


def philox4x64_first_word(key: tuple[int, int], counter: int) -> int:
    """Philox4x64-10 (Salmon et al. 2011) in plain integers: the first of four output words."""
    mask = 2**64 - 1
    words = [counter & mask, counter >> 64, 0, 0]
    first, second = key
    for _ in range(10):
        high0, low0 = divmod(words[0] * 0xD2E7470EE14C6C93, 2**64)
        high1, low1 = divmod(words[2] * 0xCA5A826395121157, 2**64)
        words = [high1 ^ words[1] ^ first, low1, high0 ^ words[3] ^ second, low0]
        first, second = (first + 0x9E3779B97F4A7C15) & mask, (second + 0xBB67AE8584CAA73B) & mask
    return words[0]


@pytest.mark.parametrize("seed", [0, 1, 12345, 2**64 - 1])
@pytest.mark.parametrize("choice", [0, 1, 2**32 - 1])
@pytest.mark.parametrize("position", [0, 1, 4095, 2**32])
def test_uniform_is_philox(seed: int, choice: int, position: int) -> None:
    """Known by its definition: key (seed, choice), counter position + 1 (numpy counts up before it draws), 24 bits."""
    words = [philox4x64_first_word((seed, choice), position + 1 + i) for i in range(3)]
    assert uniforms(seed, choice, position, 3).tolist() == [(word >> 40) * 2.0**-24 for word in words]


def test_uniform_known_values() -> None:
    """Committed, so that a new numpy cannot change texts unnoticed."""
    found = [uniforms(0, 0, 0, 1)[0], uniforms(42, 0, 0, 1)[0], uniforms(42, 1, 0, 1)[0], uniforms(42, 0, 1, 1)[0]]
    wanted = [0.011546754286331562, 0.8201981478608876, 0.443746921343274, 0.36812845090913937]
    assert found == [int(value * 2**24) / 2**24 for value in wanted]


def draws(params: SamplingParams, logits: Logits, count: int, company: int = 0, choice: int = 0) -> list[int]:
    """Tokens of one sequence, sampled beside `company` others."""
    sampler = Sampler(VOCAB)
    for seq in range(company + 1):
        sampler.add(addition(seq, params, choice=choice + seq, stop_ids=frozenset(), max_tokens=10**9))
    order = [*range(1, company + 1), 0]
    logits = np.repeat(logits, company + 1, axis=0)
    return [sample(sampler, order, logits, pos=2 + i)[-1].token for i in range(count)]


SKEWED = np.log(np.array([[0.3, 0.02, 0.2, 0.08, 0.15, 0.05, 0.1, 0.1]])).astype(np.float32)


def test_the_same_seed_gives_the_same_tokens_in_any_company() -> None:
    """Alone or beside others, and after a re-plan in the middle."""
    params = SamplingParams(temperature=1.0, seed=5)
    alone = draws(params, SKEWED, 60)
    assert alone == draws(params, SKEWED, 60, company=3)
    assert alone != draws(SamplingParams(temperature=1.0, seed=6), SKEWED, 60)
    assert alone != draws(params, SKEWED, 60, choice=1)
    history = (1, 2, *alone[:25])
    sampler = sampler_with(addition(0, params, history_ids=history, num_generated=25, stop_ids=frozenset()))
    assert [sample(sampler, (0,), SKEWED, pos=27 + i)[0].token for i in range(35)] == alone[25:]


def chi_square(tokens: list[int], probabilities: NDArray[np.float64]) -> float:
    counts = np.bincount(tokens, minlength=len(probabilities))
    assert not counts[probabilities == 0].any()
    expected = len(tokens) * probabilities[probabilities > 0]
    return float(((counts[probabilities > 0] - expected) ** 2 / expected).sum())


@pytest.mark.parametrize(
    ("params", "kept", "temperature"),
    [
        (SamplingParams(temperature=1.0, seed=1), range(8), 1.0),
        (SamplingParams(temperature=0.7, seed=2), range(8), 0.7),
        (SamplingParams(temperature=1.0, top_k=3, seed=3), (0, 2, 4), 1.0),
        (SamplingParams(temperature=1.0, top_p=0.6, seed=4), (0, 2, 4), 1.0),
    ],
    ids=["plain", "temperature", "top_k", "top_p"],
)
def test_the_draw_follows_the_distribution(params: SamplingParams, kept: Sequence[int], temperature: float) -> None:
    """4,000 positions: chi-square below its 99.99 % point (29.9 with 7 degrees of freedom, 18.4 with 2)."""
    powers = np.exp(SKEWED[0].astype(np.float64) / temperature)
    probabilities = np.zeros(VOCAB)
    probabilities[list(kept)] = powers[list(kept)] / powers[list(kept)].sum()
    statistic = chi_square(draws(params, SKEWED, 4000), probabilities)
    assert statistic < (29.9 if len(kept) == 8 else 18.4)


def test_choices_are_independent() -> None:
    """n = 2 of one seed: the pair (first, second choice) is distributed as a product."""
    params = SamplingParams(temperature=1.0, seed=9)
    first, second = draws(params, SKEWED, 4000), draws(params, SKEWED, 4000, choice=1)
    pairs = [a * VOCAB + b for a, b in zip(first, second, strict=True)]
    single = np.exp(SKEWED[0].astype(np.float64))
    joint = np.outer(single, single).reshape(-1)
    big = joint * 4000 >= 5
    counts = np.bincount(pairs, minlength=VOCAB * VOCAB)
    statistic = ((counts[big] - 4000 * joint[big]) ** 2 / (4000 * joint[big])).sum()
    assert statistic < 63 + 5 * (2 * 63) ** 0.5


DRAWN = SamplingParams(temperature=0.8, top_p=0.9, seed=3)
ON_THE_HOST = (
    SamplingParams(temperature=1.0, logit_bias={6: 1.0}),
    SamplingParams(temperature=1.0, repetition_penalty=1.1),
    SamplingParams(temperature=1.0, typical_p=0.9),
    SamplingParams(temperature=1.0, num_logprobs=0),
)


def test_what_the_device_may_draw() -> None:
    """Temperature and filters travel in the order of ops.SAMPLE_PARAMS; other rows are greedy there."""
    sampler = sampler_with(addition(0, DRAWN), addition(1), *(addition(2 + i, p) for i, p in enumerate(ON_THE_HOST)))
    rows = [(SeqId(seq), 2) for seq in (*range(6), 99)]
    table = sampler.device_params(rows)
    assert table is not None
    wanted = [0.8, 0, 0.9, 0, 0, float(uniforms(3, 0, 0, 1)[0])]
    assert table[0].tolist() == pytest.approx(wanted, rel=1e-7)
    assert not table[1:, 0].any()
    assert sampler.device_params(rows[1:]) is None
    assert not sampler.needs_logits(rows[:2])
    assert all(sampler.needs_logits([row]) for row in rows[2:6])


def test_numbers_are_known_before_the_tokens() -> None:
    """A step that is launched before the one before it is sampled gets the numbers of its own position; so does one
    that comes again, and a sequence that was re-planned."""
    fresh = sampler_with(addition(0, DRAWN))
    numbers = uniforms(3, 0, 0, 200)
    for pos in (2, 3, 4, 66, 65, 130, 3):
        table = fresh.device_params([(SeqId(0), pos)])
        assert table is not None
        assert table[0, 5] == numbers[pos - 2]
    replanned = sampler_with(addition(0, DRAWN, history_ids=(1, 2, 5, 5, 5), num_generated=3))
    table = replanned.device_params([(SeqId(0), 5)])
    assert table is not None
    assert table[0, 5] == numbers[3]


@pytest.mark.parametrize("temperature", [1e-30, 1e300, float("inf")])
def test_extreme_temperatures_travel_as_float32(temperature: float) -> None:
    """B-32: neither 0 (which would be greedy by another road) nor infinite."""
    table = sampler_with(addition(0, SamplingParams(temperature=temperature))).device_params([(SeqId(0), 2)])
    assert table is not None
    assert 0 < table[0, 0] < np.inf


def test_what_the_device_drew_is_taken() -> None:
    """A mixed step: logits are fetched for the row that needs them, and only that row is drawn here."""
    sampler = sampler_with(addition(0, DRAWN), addition(1), addition(2, ON_THE_HOST[0]), addition(3, DRAWN))
    chosen = np.array([6, 4, 1, -1], np.int32)
    tokens = sampler.sample([(SeqId(seq), 2) for seq in range(4)], lambda wanted: 50 * rows(1, 1, 5, 1)[wanted], chosen)
    assert [token.token for token in tokens] == [6, 4, 5, 0]
    assert tokens[3].finish is FinishReason.ERROR


def test_rows_that_were_changed_here_are_drawn_together() -> None:
    """One call for all of them, with their own parameters and numbers; typical_p has no place on a device."""
    given = []

    def draw(logits: Logits, params: Logits) -> NDArray[np.int32]:
        given.append((logits, params))
        return np.array([3, -1], np.int32)

    sampler = Sampler(VOCAB, draw=draw)
    for seq, params in enumerate((ON_THE_HOST[0], DRAWN, ON_THE_HOST[2], ON_THE_HOST[1])):
        sampler.add(addition(seq, params))
    raw = 50 * rows(1, 1, 5, 1)
    tokens = sampler.sample([(SeqId(seq), 2) for seq in range(4)], raw, np.array([1, 6, 1, 1], np.int32))
    assert [token.token for token in tokens] == [3, 6, 5, 0]
    assert tokens[3].error == "NumericalError: the logits for position 2 are not finite"
    ((logits, params),) = given
    assert logits[0].tolist() == [0, 150, 0, 0, 0, 0, 1, 0]
    assert logits[1, 1] == pytest.approx(150 / 1.1), "token 1 is in the history"
    assert params[:, 0].tolist() == [1, 1]
    assert params[:, 5].tolist() == [uniforms(0, 0, 0, 1)[0]] * 2


@pytest.mark.parametrize("kind", ["reference", "cpu"])
def test_host_and_device_draw_the_same_tokens(kind: str) -> None:
    """B-31: one distribution and one number give one token, wherever it is drawn."""
    backend = create_backend(kind)
    filtered = [
        DRAWN,
        SamplingParams(temperature=1.2, seed=8),
        SamplingParams(temperature=1.0, top_k=20, top_p=0.8, seed=4),
        SamplingParams(temperature=2.0, min_p=0.05, top_n_sigma=2.0, seed=5),
        SamplingParams(),
    ]
    vocab, count = 700, len(filtered)
    x = backend.alloc((count, vocab), DType.F32, Extent.LOGIT_ROWS)
    params = backend.alloc((count, len(ops.SAMPLE_PARAMS)), DType.F32, Extent.LOGIT_ROWS)
    out = backend.alloc((count,), DType.I32, Extent.LOGIT_ROWS)
    sampler = Sampler(vocab)
    for seq, sampling in enumerate(filtered):
        sampler.add(addition(seq, sampling, stop_ids=frozenset()))
    rng = np.random.default_rng(2)
    for pos in range(2, 42):
        logits = rng.normal(0, 2, (count, vocab)).astype(np.float32)
        wanted = [(SeqId(seq), pos) for seq in range(count)]
        table = sampler.device_params(wanted)
        assert table is not None
        backend.upload(x, logits)
        backend.upload(params, table)
        backend.set_shape(StepShape(count, count, count))
        ops.argmax(backend, x, out)
        ops.sample(backend, x, params, out)
        assert backend.download(out, count).tolist() == [t.token for t in sampler.sample(wanted, logits)]
    backend.close()


def test_the_arena_has_room_for_the_parameters() -> None:
    """`spec` knows no ops: the width stands there as a number."""
    assert len(ops.SAMPLE_PARAMS) == NUM_SAMPLING_PARAMS
