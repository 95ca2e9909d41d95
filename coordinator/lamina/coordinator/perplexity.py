"""Perplexity of a text over a deployed model, by the convention of llama.cpp's `llama-perplexity`.

The tokens are cut into windows of equal length, each a sequence of its own; the rest is dropped. Of a window of n
tokens the first half is only context: tokens n/2 + 1 to n - 1 are scored, given all that is before them in the window.
Models whose vocabulary says so see their begin-of-text token in place of each window's first. Perplexity is the
exponential of the mean negative log-probability; its standard error treats the scored tokens as independent.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lamina.coordinator.cluster.pipeline import Pipeline
from lamina.spec.errors import InvalidRequest, NumericalError, WorkerLost
from lamina.spec.ids import BlockId, Epoch, SeqId, StepId
from lamina.spec.placement import StageSettings
from lamina.spec.sampling import SamplingParams
from lamina.spec.step import BLOCK_TOKENS, MAX_RUN_AHEAD, AddSequence, RemoveSequence, SeqSlice, StepPlan, Tokens

MIN_WINDOW = 8  # so that there is more than one score, and with it an error

Window = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Perplexity:
    """The result over so many scored tokens."""

    value: float
    standard_error: float
    num_scored: int


class WindowStep(NamedTuple):
    """A step of one window; `window` counts them."""

    plan: StepPlan
    window: int
    is_first: bool
    is_last: bool


def cut_windows(
    tokens: Sequence[int], length: int, bos_id: int | None = None, limit: int | None = None
) -> list[Window]:
    """Whole windows of `length` tokens, at most `limit`; `bos_id` replaces each one's first token.

    Raises InvalidRequest if not even one is full.
    """
    if length < MIN_WINDOW:
        raise InvalidRequest(f"chunks of {length} tokens score nothing; they must have at least {MIN_WINDOW}")
    starts = range(0, len(tokens) - length + 1, length)[:limit]
    if not starts:
        raise InvalidRequest(f"the text has {len(tokens)} tokens, one chunk takes {length}: use --chunk or more text")
    start_token = () if bos_id is None else (bos_id,)
    return [(*start_token, *tokens[start + len(start_token) : start + length]) for start in starts]


def perplexity_of(scores: Sequence[float]) -> Perplexity:
    """From two natural log-probabilities or more."""
    count = len(scores)
    mean = -math.fsum(scores) / count
    value = math.exp(mean)
    variance = math.fsum((score + mean) ** 2 for score in scores) / count
    return Perplexity(value, value * math.sqrt(variance / (count - 1)), count)


def plan_windows(
    windows: Sequence[Window], epoch: Epoch, settings: StageSettings, num_groups: int, num_lanes: int
) -> Iterator[WindowStep]:
    """The steps that score the windows, in order. Window w takes the blocks of lane w mod `num_lanes`.

    A step has as many rows as fit, of which at most `max_logit_rows` are scored. A window's last token is only ever
    predicted, so it takes no row.
    """
    step = 0
    for index, window in enumerate(windows):
        first_scored, num_rows = len(window) // 2, len(window) - 1
        lane = index % num_lanes * settings.max_blocks_per_seq
        pos = 0
        while pos < num_rows:
            end = min(num_rows, pos + settings.max_rows, max(pos, first_scored) + settings.max_logit_rows)
            held, needed = -(-pos // BLOCK_TOKENS), -(-end // BLOCK_TOKENS)
            blocks = tuple(BlockId(lane + block) for block in range(held, needed))
            source = Tokens(window[pos:end])
            piece = SeqSlice(SeqId(index), pos, end - pos, source, (blocks,) * num_groups, False)
            num_scored = max(0, end - max(pos, first_scored))
            plan = StepPlan(epoch, StepId(step), (piece,), num_scored=(num_scored,))
            yield WindowStep(plan, index, pos == 0, end == num_rows)
            pos, step = end, step + 1


class WindowScorer:
    """Sends windows through a pipeline and gathers their scores. No step waits for an answer: the pipeline stays full.

    `scores` holds the natural log-probabilities of the windows that are done, in order.
    """

    def __init__(self, pipeline: Pipeline, windows: Sequence[Window], on_window: Callable[[int], None]) -> None:
        """`on_window` is told how many windows are done, each time one is."""
        self.scores: list[float] = []
        self._pipeline = pipeline
        self._windows = windows
        self._on_window = on_window
        self._num_lanes = max(1, min(pipeline.num_blocks) // pipeline.settings.max_blocks_per_seq)
        self._waiting: deque[WindowStep] = deque()
        self._num_done = 0

    async def run(self) -> None:
        """Score them all. Raises what ended the pipeline, NumericalError where logits were not finite."""
        pipeline = self._pipeline
        steps = plan_windows(
            self._windows, pipeline.placement.epoch, pipeline.settings, len(pipeline.num_blocks), self._num_lanes
        )
        for step in steps:
            # A lane's blocks are free once the window that had them is done.
            while len(self._waiting) >= MAX_RUN_AHEAD - 1 or step.window >= self._num_done + self._num_lanes:
                await self._take_answer()
            if step.is_first:
                pipeline.add_sequence(_addition(step.window, self._windows[step.window]))
            pipeline.issue(step.plan)
            self._waiting.append(step)
        while self._waiting:
            await self._take_answer()

    async def _take_answer(self) -> None:
        step, done = self._waiting.popleft(), await self._pipeline.next_done()
        (wanted,) = step.plan.num_scored
        if done.step != step.plan.step or len(done.scores) != wanted:
            answered = f"step {done.step} with {len(done.scores)} scores"
            raise WorkerLost(f"the last stage answered {answered} to step {step.plan.step}, which wants {wanted}")
        if any(map(math.isnan, done.scores)):
            raise NumericalError(f"chunk {step.window}: the logits are not finite")
        self.scores += done.scores
        if step.is_last:
            self._pipeline.remove_sequence(RemoveSequence(SeqId(step.window)))
            self._num_done += 1
            self._on_window(self._num_done)


def _addition(index: int, window: Window) -> AddSequence:
    return AddSequence(SeqId(index), SamplingParams(), window, frozenset(), max_tokens=1)
