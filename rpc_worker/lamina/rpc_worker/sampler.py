"""The last stage's sampler: from logits to tokens, and the decision that a sequence has ended.

Owned by the compute thread. Per sequence it holds what AddSequence brought and what was generated since; random
numbers are counter-based, so there is no random state to lose, and a row's number is known before its step is launched.
That is how the device draws (`device_params`): everything but penalties, bias, grammars, typical_p and
log-probabilities, which need the row on the host.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from lamina.kernels.ops import SAMPLE_PARAMS
from lamina.rpc_worker import filters
from lamina.rpc_worker.grammar import GrammarCompiler, GrammarMatcher
from lamina.spec.errors import InvalidPlan, InvalidRequest, LaminaError, NumericalError
from lamina.spec.ids import SeqId
from lamina.spec.step import AddSequence, FinishReason, SampledToken

Logits = NDArray[np.float32]
Ints = NDArray[np.int32]
_NO_LOGITS: Logits = np.zeros((0, 0), np.float32)
_GREEDY = (0.0, 0.0, 1.0, 0.0, 0.0)  # SAMPLE_PARAMS without the number
_TEMPERATURES = (1e-6, 1e30)  # in float32 a lower one might be 0, a higher one is infinite; both count as these (B-32)
_NUMBERS_AT_ONCE = 64  # making a generator costs as much as these


@dataclass
class _SequenceState:
    add: AddSequence
    history: list[int]  # the last of its tokens; `add.num_omitted` others come before
    num_generated: int
    ended: bool = False
    matcher: GrammarMatcher | None = None
    failure: str = ""  # why its grammar cannot be used
    numbers: Logits = field(default_factory=lambda: np.zeros(0, np.float32))  # uniforms ahead
    first_number: int = 0  # the output position of the first of them
    bias_ids: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    bias: Logits = field(default_factory=lambda: np.zeros(0, np.float32))

    def __post_init__(self) -> None:
        p = self.add.sampling
        has_changes = p.logit_bias or filters.has_penalties(p) or self.add.grammar
        self.is_greedy = p.temperature <= 0
        self.is_drawn_on_device = not has_changes and p.num_logprobs < 0 and (self.is_greedy or p.typical_p >= 1)
        lowest, highest = _TEMPERATURES
        temperature = 0.0 if self.is_greedy else min(max(p.temperature, lowest), highest)
        self.device_row = (temperature, float(p.top_k), p.top_p, p.min_p, p.top_n_sigma)
        self._num_prompt = self.add.num_prompt

    def uniform_at(self, pos: int) -> float:
        """The random number of the token at this position of the sequence."""
        position = max(0, pos - self._num_prompt)
        index = position - self.first_number
        if not 0 <= index < len(self.numbers):
            self.first_number = position
            self.numbers = uniforms(self.add.sampling.seed, self.add.choice, self.first_number, _NUMBERS_AT_ONCE)
            index = 0
        return float(self.numbers[index])


class Sampler:
    """Samples one token for each row of logits."""

    def __init__(
        self,
        vocab_size: int,
        grammars: GrammarCompiler | None = None,
        draw: Callable[[Logits, Logits], Ints] | None = None,
    ) -> None:
        """`grammars` serves sequences that have one; without it those end with an error.

        `draw` has the device draw from rows that were changed here, float32 [rows, vocab], by parameters as
        `device_params` gives them, and answers int32 [rows]; without it they are drawn here, which takes longer.
        """
        self._draw = draw
        self._vocab_size = vocab_size
        self._grammars = grammars
        self._sequences: dict[SeqId, _SequenceState] = {}

    def add(self, add: AddSequence) -> None:
        """Make a sequence known before its first step. Raises InvalidPlan if it is known, or its history impossible."""
        if add.seq in self._sequences:
            raise InvalidPlan(f"sequence {add.seq} was added before; ids are never used twice")
        if max(add.history_ids, default=0) >= self._vocab_size:
            raise InvalidPlan(f"sequence {add.seq}: its history has ids outside the vocabulary of {self._vocab_size}")
        state = _SequenceState(add, list(add.history_ids), add.num_generated)
        biased = {token: bias for token, bias in add.sampling.logit_bias.items() if token < self._vocab_size}
        state.bias_ids = np.fromiter(biased.keys(), np.int64, len(biased))
        state.bias = np.fromiter(biased.values(), np.float32, len(biased))
        if add.grammar:
            self._compile_grammar(state)
        self._sequences[add.seq] = state

    def remove(self, seq: SeqId) -> None:
        """Forget a sequence; unknown ones are fine."""
        self._sequences.pop(seq, None)

    def refuse(self, seqs: Iterable[SeqId], cause: str) -> None:
        """These have lost a step: each ends at its next token, with `cause`; unknown ones are fine."""
        for seq in seqs:
            state = self._sequences.get(seq)
            if state is not None:
                state.failure = state.failure or cause

    def clear(self) -> None:
        """Forget all."""
        self._sequences.clear()

    def needs_logits(self, rows: Sequence[tuple[SeqId, int]]) -> bool:
        """Whether `sample` of these rows needs more than the device's own tokens."""
        return bool(self._host_rows(rows))

    def device_params(self, rows: Sequence[tuple[SeqId, int]]) -> Logits | None:
        """What `ops.sample` takes for these rows, float32 [len(rows), SAMPLE_PARAMS]; None if argmax will do for all.

        Rows that need the host are greedy on the device: their argmax tells whether they are finite.
        """
        drawn = False
        table = []
        for seq, pos in rows:
            state = self._sequences.get(seq)
            if state is not None and state.is_drawn_on_device and not state.is_greedy:
                table.append((*state.device_row, state.uniform_at(pos)))
                drawn = True
            else:
                table.append((*_GREEDY, 0.0))
        return np.array(table, np.float32).reshape(-1, len(SAMPLE_PARAMS)) if drawn else None

    def sample(
        self,
        rows: Sequence[tuple[SeqId, int]],
        logits: Logits | Callable[[list[int]], Logits],
        chosen: Ints | None = None,
    ) -> tuple[SampledToken, ...]:
        """One token per row: `rows` are (sequence, position of the new token), logits float32 [len(rows), vocab].

        `logits` may be a function that fetches some of them from the device, by row; it is called if any are needed.
        `chosen` int32 [len(rows)] is what the device drew by `device_params`, -1 for a row that is not finite; without
        it everything is drawn here.

        A sequence that has ended gets token 0, which nobody uses. Non-finite logits end their own sequence with
        FinishReason.ERROR (A-05, B-35), and so does a row of a sequence that was never added.
        """
        if not rows:
            return ()
        fetched = list(range(len(rows))) if chosen is None else self._host_rows(rows)
        values = _NO_LOGITS
        if fetched:
            values = logits(fetched) if callable(logits) else logits[fetched]
        if chosen is None:
            chosen = best_tokens(values)
        raw_rows = dict(zip(fetched, values, strict=True))
        best = chosen.tolist()
        picks: dict[int, int | str] = {}
        if raw_rows:
            picks = self._pick(rows, {row: raw for row, raw in raw_rows.items() if best[row] >= 0})
        sampled = []
        for i, (seq, pos) in enumerate(rows):
            state, pick = self._sequences.get(seq), picks.get(i, best[i])
            if state is None:
                cause = f"InvalidPlan: sequence {seq} was not added before its first step"
                sampled.append(SampledToken(seq, pos, 0, finish=FinishReason.ERROR, error=cause))
            elif state.ended:
                sampled.append(SampledToken(seq, pos, 0))
            elif isinstance(pick, str):
                sampled.append(_fail(state, pos, pick))
            elif pick < 0:
                sampled.append(_fail(state, pos, f"NumericalError: the logits for position {pos} are not finite"))
            elif state.failure:
                sampled.append(_fail(state, pos, state.failure))
            else:
                try:
                    sampled.append(self._advance(state, pos, pick, raw_rows.get(i)))
                except LaminaError as error:  # its grammar, after this token
                    sampled.append(_fail(state, pos, f"{type(error).__name__}: {error}"))
        return tuple(sampled)

    def _pick(self, rows: Sequence[tuple[SeqId, int]], raw_rows: Mapping[int, Logits]) -> dict[int, int | str]:
        """The tokens of rows whose logits are here, by row, or why there is none: all at once where that can be."""
        picks: dict[int, int | str] = {}
        table, together, row_of = [], [], []
        for row, raw in raw_rows.items():
            seq, pos = rows[row]
            state = self._sequences.get(seq)
            if state is None or state.ended or state.failure:
                continue
            try:
                changed = _changed(state, pos, raw)
            except LaminaError as error:
                picks[row] = f"{type(error).__name__}: {error}"
                continue
            params = state.add.sampling
            if self._draw is not None and params.typical_p >= 1:
                together.append(changed)
                table.append((*state.device_row, state.uniform_at(pos)))
                row_of.append(row)
            elif state.is_greedy:
                picks[row] = int(changed.argmax())
            else:
                picks[row] = filters.draw(changed, params, state.uniform_at(pos))
        if self._draw is not None and together:
            tokens = self._draw(np.stack(together), np.array(table, np.float32))
            picks.update(zip(row_of, tokens.tolist(), strict=True))
        return picks

    def _host_rows(self, rows: Sequence[tuple[SeqId, int]]) -> list[int]:
        """Which of these rows `sample` needs logits of, beside what the device drew."""
        states = [self._sequences.get(seq) for seq, _ in rows]
        return [i for i, state in enumerate(states) if state and not state.ended and not state.is_drawn_on_device]

    def score(self, wanted: Iterable[tuple[SeqId, range]], logits: Logits) -> tuple[float, ...]:
        """Natural log-probabilities of tokens in the histories: of each sequence those at the given positions.

        `logits` float32 [positions in all, vocab] predict them, in order. NaN where they are not finite. Raises
        InvalidPlan for a sequence that is unknown or has no such position.
        """
        scores: list[float] = []
        for seq, positions in wanted:
            state = self._sequences.get(seq)
            if state is None or state.add.num_omitted or positions.stop > len(state.history):
                where = f"{positions.start}-{positions.stop - 1}"
                raise InvalidPlan(f"sequence {seq}: its history has no tokens at {where} to be scored")
            scores += [filters.logprob(logits[len(scores) + i], state.history[pos]) for i, pos in enumerate(positions)]
        return tuple(scores)

    def _advance(self, state: _SequenceState, pos: int, token: int, raw: Logits | None) -> SampledToken:
        logprob: float | None = None
        top: tuple[tuple[int, float], ...] = ()
        if raw is not None and state.add.sampling.num_logprobs >= 0:
            logprob, top = filters.logprobs(raw, token, state.add.sampling.num_logprobs)
        state.history.append(token)
        state.num_generated += 1
        finish = None
        if token in state.add.stop_ids or (state.matcher is not None and state.matcher.consume(token)):
            finish = FinishReason.STOP
        elif state.num_generated >= state.add.max_tokens:
            finish = FinishReason.LENGTH
        state.ended = finish is not None
        return SampledToken(state.add.seq, pos, token, logprob, top, finish)

    def _compile_grammar(self, state: _SequenceState) -> None:
        """A grammar that fails ends its own sequence, at its first token."""
        generated = state.history[max(0, len(state.history) - state.num_generated) :]
        try:
            if self._grammars is None:
                raise InvalidRequest("this stage cannot follow grammars")
            state.matcher = self._grammars.compile(state.add.grammar, generated)
        except LaminaError as error:
            state.failure = f"{type(error).__name__}: {error}"


def _changed(state: _SequenceState, pos: int, raw: Logits) -> Logits:
    """The row after bias, penalties and grammar. Raises NumericalError if they leave nothing to choose."""
    logits = raw.astype(np.float32, copy=True)
    logits[state.bias_ids] += state.bias
    filters.apply_penalties(logits, state.history, state.num_generated, state.add.sampling)
    if state.matcher is not None:
        logits[~state.matcher.mask(state.add.stop_ids)] = -np.inf
    if not np.isfinite(logits.max()):
        raise NumericalError(f"bias, penalties or the grammar leave no token to choose for position {pos}")
    return logits


def _fail(state: _SequenceState, pos: int, cause: str) -> SampledToken:
    state.ended = True
    return SampledToken(state.add.seq, pos, 0, finish=FinishReason.ERROR, error=cause)


def best_tokens(logits: Logits) -> Ints:
    """The most likely token of each row, the first of equals; -1 where the largest value is not finite."""
    best = logits.argmax(axis=1)  # a NaN wins, and is caught by its value
    return np.where(np.isfinite(logits[np.arange(len(best)), best]), best, -1).astype(np.int32)


def uniforms(seed: int, choice: int, first: int, count: int) -> Logits:
    """The random numbers in [0, 1) of output positions from `first`, float32 [count], exact multiples of 2**-24.

    Philox-4x64 keyed by (seed, choice), counter = position: they depend on nothing else, so a sequence is sampled alike
    at any split, in any company and after any re-plan. 24 bits, so that every device gets the very same number.
    """
    generator = np.random.Philox(key=np.array([seed, choice], np.uint64), counter=first)
    words = generator.random_raw(4 * count)[::4]  # a count of the counter makes four
    return (words >> np.uint64(40)).astype(np.float32) * np.float32(2**-24)
