"""The step queue: the same steps become ready with the same input, in whatever order plans, frames and tokens come."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.spec.errors import InvalidPlan, StaleEpoch
from lamina.spec.ids import Epoch, SeqId, StepId
from lamina.spec.step import (
    MAX_RUN_AHEAD,
    FromSample,
    RemoveSequence,
    SliceInput,
    StepDone,
    StepPlan,
    Tokens,
)
from support.step_messages import (
    EPOCH,
    HIDDEN,
    SETTINGS,
    VOCAB,
    decode,
    done,
    drain,
    frame,
    held_tokens,
    ids,
    new_queue,
    plan,
    prefill,
)


@dataclass(frozen=True)
class Conversation:
    """Steps of a few sequences: the first step of each has ids, later ones feed on what was sampled."""

    plans: list[StepPlan]
    answers: list[StepDone]

    @property
    def inputs(self) -> list[list[int]]:
        """What every step must be fed."""
        sampled = {(t.seq, t.pos): t.token for answer in self.answers for t in answer.tokens}
        fed = []
        for step in self.plans:
            row: list[int] = []
            for piece in step.slices:
                known = piece.input.ids if isinstance(piece.input, Tokens) else (sampled[piece.seq, piece.pos],)
                row.extend(known)
            fed.append(row)
        return fed


@st.composite
def conversations(draw: st.DrawFn) -> Conversation:
    lengths: dict[int, int] = {}
    last: dict[int, tuple[int, int]] = {}
    plans, answers = [], []
    for step in range(draw(st.integers(1, 8))):
        seqs = draw(st.lists(st.integers(0, 3), min_size=1, max_size=3, unique=True))
        pieces: list[tuple[int, int, SliceInput]] = []
        for row, seq in enumerate(seqs):
            pos = lengths.get(seq, 0)
            source: SliceInput = FromSample(StepId(last[seq][0]), last[seq][1]) if seq in last else Tokens((5, seq))
            pieces.append((seq, pos, source))
            lengths[seq] = pos + (1 if seq in last else 2)
            last[seq] = (step, row)
        plans.append(plan(step, *pieces))
        answers.append(done(step, *((seq, lengths[seq], draw(st.integers(0, VOCAB - 1))) for seq in seqs)))
    return Conversation(plans, answers)


@given(conversations(), st.randoms(use_true_random=False))
def test_first_stage_takes_plans_and_tokens_in_any_order(talk: Conversation, random: object) -> None:
    """Plans come in order on their stream, answers on the edge once stage 0 has run the step, or as relayed tokens, or
    both, in either order: the ready sequence is the same."""
    queue = new_queue(takes_tokens=True)
    events: list[Callable[[], None]] = []
    plans, ready = list(talk.plans), []
    shuffle: Callable[[list[object]], None] = random.shuffle  # type: ignore[attr-defined]
    chance: Callable[[], float] = random.random  # type: ignore[attr-defined]

    def answer(step: int) -> list[Callable[[], None]]:
        """The edge's answer, the relay's tokens, or both."""
        edge = [lambda: queue.add_done(talk.answers[step])]
        relay = [
            lambda t=t: queue.add_token(EPOCH, t.seq, t.pos, t.token)  # type: ignore[misc]
            for t in talk.answers[step].tokens
        ]
        choice = chance()
        return edge if choice < 0.3 else relay if choice < 0.6 else edge + relay

    while plans or events:
        shuffle(events)  # type: ignore[arg-type]
        if plans and (not events or chance() < 0.5):
            queue.add_plan(plans.pop(0))
        else:
            events.pop()()
        for step in drain(queue):
            ready.append(step)
            events.extend(answer(step.plan.step))
    assert [step.plan for step in ready] == talk.plans
    assert ids(ready) == talk.inputs


@given(st.integers(1, 10), st.randoms(use_true_random=False))
def test_later_stages_take_plans_and_frames_in_any_order(num_steps: int, random: object) -> None:
    """Frames may even overtake each other; they are run in step order, each with its own values."""
    queue = new_queue(takes_tokens=False)
    plans = [prefill(step, step) for step in range(num_steps)]
    frames = [frame(step_plan, step) for step, step_plan in enumerate(plans)]
    random.shuffle(frames)  # type: ignore[attr-defined]
    waiting, ready = list(plans), []
    while waiting or frames:
        if waiting and (not frames or random.random() < 0.5):  # type: ignore[attr-defined]
            queue.add_plan(waiting.pop(0))
        else:
            queue.add_frame(frames.pop())
        ready += drain(queue)
    assert [step.plan for step in ready] == plans
    for number, step in enumerate(ready):
        assert step.tokens is None
        assert step.hidden is not None
        assert (step.hidden == np.full((2, HIDDEN), number)).all()


@pytest.mark.parametrize("takes_tokens", [True, False])
def test_another_epoch_is_refused(takes_tokens: bool) -> None:
    queue = new_queue(takes_tokens=takes_tokens)
    for epoch in (Epoch(EPOCH - 1), Epoch(EPOCH + 1)):
        other = plan(0, (0, 0, Tokens((1,))), epoch=epoch)
        with pytest.raises(StaleEpoch, match=f"epoch {epoch}, this stage is in epoch {EPOCH}"):
            queue.add_plan(other)
        with pytest.raises(StaleEpoch):
            queue.add_frame(frame(other))
        with pytest.raises(StaleEpoch):
            queue.add_done(done(0, epoch=epoch))
        with pytest.raises(StaleEpoch):
            queue.add_token(epoch, SeqId(0), 1, 1)
    assert queue.pop_ready() is None


def test_plans_come_in_order_and_once() -> None:
    queue = new_queue(takes_tokens=True)
    with pytest.raises(InvalidPlan, match="step 1 after that of step -1"):
        queue.add_plan(prefill(1))
    queue.add_plan(prefill(0))
    for wrong in (0, 2):
        with pytest.raises(InvalidPlan, match=f"step {wrong} after that of step 0"):
            queue.add_plan(prefill(wrong))
    assert len(drain(queue)) == 1
    assert queue.next_step == 1


def test_run_ahead_is_bounded() -> None:
    """What is held back: MAX_RUN_AHEAD plans, and frames of as many steps."""
    queue = new_queue(takes_tokens=False)
    for step in range(MAX_RUN_AHEAD):
        queue.add_plan(prefill(step))
    with pytest.raises(InvalidPlan, match=f"more than {MAX_RUN_AHEAD} ahead of step 0"):
        queue.add_plan(prefill(MAX_RUN_AHEAD))
    with pytest.raises(InvalidPlan, match=f"frame of step {MAX_RUN_AHEAD} is not expected"):
        queue.add_frame(frame(prefill(MAX_RUN_AHEAD)))
    queue.add_frame(frame(prefill(0)))
    assert len(drain(queue)) == 1
    queue.add_plan(prefill(MAX_RUN_AHEAD))
    queue.add_frame(frame(prefill(MAX_RUN_AHEAD)))


def test_duplicate_and_past_frames() -> None:
    queue = new_queue(takes_tokens=False)
    queue.add_frame(frame(prefill(0)))
    with pytest.raises(InvalidPlan, match="frame of step 0 is not expected"):
        queue.add_frame(frame(prefill(0)))
    queue.add_plan(prefill(0))
    assert len(drain(queue)) == 1
    with pytest.raises(InvalidPlan, match="step 1 runs next"):
        queue.add_frame(frame(prefill(0)))


def test_frames_are_checked_against_their_plan_whichever_comes_first() -> None:
    wrong = frame(plan(0, (0, 0, Tokens((1, 2, 3)))))
    queue = new_queue(takes_tokens=False)
    queue.add_plan(prefill(0))
    with pytest.raises(InvalidPlan, match="the plan says"):
        queue.add_frame(wrong)
    queue.add_frame(frame(prefill(0)))  # the right one is still taken
    assert len(drain(queue)) == 1
    queue = new_queue(takes_tokens=False)
    queue.add_frame(wrong)
    with pytest.raises(InvalidPlan, match="the plan says"):
        queue.add_plan(prefill(0))


def test_an_impossible_frame_is_not_kept_for_its_plan() -> None:
    """P-15: 64 MiB of payload that no plan can ask for must not wait in memory."""
    queue = new_queue(takes_tokens=False)
    sound = frame(prefill(0))
    for bad in (
        sound._replace(rows=SETTINGS.max_rows + 1),
        sound._replace(hidden=2**31),
        sound._replace(num_bytes=100),
    ):
        for take in (queue.expect_frame, queue.add_frame):
            with pytest.raises(InvalidPlan):
                take(bad)
    queue.expect_frame(sound._replace(payload=b""))
    queue.add_frame(sound)
    with pytest.raises(InvalidPlan, match="frame of step 0 is not expected"):
        queue.expect_frame(sound)


def test_each_side_takes_its_own_input_only() -> None:
    with pytest.raises(InvalidPlan, match="takes tokens, not frames"):
        new_queue(takes_tokens=True).add_frame(frame(prefill(0)))
    with pytest.raises(InvalidPlan, match="only the first stage takes tokens"):
        new_queue(takes_tokens=False).add_token(EPOCH, SeqId(0), 1, 1)


@pytest.mark.parametrize(
    "pieces",
    [
        [(0, 0, Tokens((1,) * (SETTINGS.max_rows + 1)))],
        [(seq, 0, Tokens((1,))) for seq in range(SETTINGS.max_seqs + 1)],
        [(seq, 0, Tokens((1,))) for seq in range(SETTINGS.max_logit_rows + 1)],
    ],
    ids=["rows", "sequences", "logit rows"],
)
def test_plans_larger_than_the_arena(pieces: list[tuple[int, int, SliceInput]]) -> None:
    with pytest.raises(InvalidPlan, match=r"the arena holds \(8, 4, 3\)"):
        new_queue(takes_tokens=True).add_plan(plan(0, *pieces))


@pytest.mark.parametrize("token", [VOCAB, 2**31, 2**32 - 1])
def test_tokens_outside_the_vocabulary(token: int) -> None:
    """From a plan, from the edge and from the relay: 2**31 would not even fit the arena's int32."""
    queue = new_queue(takes_tokens=True)
    with pytest.raises(InvalidPlan, match=rf"not within \[0, {VOCAB}\)"):
        queue.add_plan(plan(0, (0, 0, Tokens((1, token)))))
    queue.add_plan(prefill(0))
    drain(queue)
    with pytest.raises(InvalidPlan, match="not within"):
        queue.add_done(done(0, (0, 2, token)))
    with pytest.raises(InvalidPlan, match="not within"):
        queue.add_token(EPOCH, SeqId(0), 2, token)


def test_from_sample_is_keyed_by_sequence_and_position() -> None:
    queue = new_queue(takes_tokens=True)
    queue.add_plan(prefill(0))
    queue.add_plan(decode(1))
    assert len(drain(queue)) == 1
    queue.add_done(done(0, (1, 2, 50), (0, 3, 51)))  # another sequence, another position
    assert drain(queue) == []
    queue.add_token(EPOCH, SeqId(0), 2, 52)
    assert ids(drain(queue)) == [[52]]


@pytest.mark.parametrize("edge_first", [True, False])
def test_the_first_of_two_tokens_counts(edge_first: bool) -> None:
    """Edge and relay carry the same token; should they not, the first one stands."""
    queue = new_queue(takes_tokens=True)
    queue.add_plan(prefill(0))
    drain(queue)
    both = [lambda: queue.add_done(done(0, (0, 2, 60))), lambda: queue.add_token(EPOCH, SeqId(0), 2, 61)]
    for add in both if edge_first else reversed(both):
        add()
    queue.add_plan(decode(1))
    assert ids(drain(queue)) == [[60 if edge_first else 61]]


def test_a_late_duplicate_changes_nothing() -> None:
    queue = new_queue(takes_tokens=True)
    queue.add_plan(prefill(0))
    drain(queue)
    queue.add_token(EPOCH, SeqId(0), 2, 60)
    queue.add_plan(decode(1))
    drain(queue)
    queue.add_done(done(0, (0, 2, 60)))
    queue.add_plan(decode(2, pos=3))
    assert drain(queue) == []
    queue.add_done(done(1, (0, 3, 61)))
    assert ids(drain(queue)) == [[61]]


def test_an_answer_to_a_step_that_has_not_run_here() -> None:
    """The last stage cannot have answered what this one has not begun."""
    queue = new_queue(takes_tokens=True)
    queue.add_plan(prefill(0))
    with pytest.raises(InvalidPlan, match="answer to step 0, which has not run here"):
        queue.add_done(done(0, (0, 2, 60)))


def test_tokens_that_nobody_wants_are_bounded() -> None:
    """A peer may send tokens without end; those that a legal plan can still refer to are kept."""
    queue = new_queue(takes_tokens=True)
    limit = 2 * MAX_RUN_AHEAD * SETTINGS.max_logit_rows
    for seq in range(10 * limit):
        queue.add_token(EPOCH, SeqId(seq), 5, 1)
        assert held_tokens(queue) <= limit
    queue.add_plan(prefill(0))
    queue.add_plan(plan(1, (10 * limit - limit, 5, FromSample(StepId(0), 0))))
    assert len(drain(queue)) == 2


def test_tokens_of_a_removed_sequence_are_dropped() -> None:
    queue = new_queue(takes_tokens=True)
    for seq in (1, 2):
        for pos in (4, 5):
            queue.add_token(EPOCH, SeqId(seq), pos, 1)
    queue.add_edit(RemoveSequence(SeqId(1)))
    assert held_tokens(queue) == 2
    queue.add_edit(RemoveSequence(SeqId(1)))
    assert queue.pop_edits() == [RemoveSequence(SeqId(1))] * 2


def test_tokens_are_dropped_once_used() -> None:
    queue = new_queue(takes_tokens=True)
    queue.add_plan(prefill(0))
    for step in range(1, 500):
        queue.add_plan(decode(step, pos=step + 1))
        drain(queue)
        queue.add_done(done(step - 1, (0, step + 1, step % VOCAB)))
        drain(queue)
    assert queue.next_step == 500
    assert held_tokens(queue) == 0
