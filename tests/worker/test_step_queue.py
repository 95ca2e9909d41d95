"""The step queue: the same steps become ready with the same input, in whatever order plans, frames and tokens come."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.kernels.buffer import DType
from lamina.kernels.reference import ReferenceBackend
from lamina.rpc_worker.loan import Loan
from lamina.rpc_worker.step_queue import LentTokens, ReadyStep, StepQueue
from lamina.spec.errors import InvalidPlan, StaleEpoch
from lamina.spec.ids import Epoch, SeqId, StepId
from lamina.spec.placement import StageSettings
from lamina.spec.step import (
    MAX_RUN_AHEAD,
    FromSample,
    RemoveSequence,
    SampledToken,
    SeqSlice,
    SliceInput,
    StepDone,
    StepPlan,
    Tokens,
)
from lamina.v1 import step_pb2 as pb
from lamina.wire.frames import encode_frame

EPOCH = Epoch(4)
HIDDEN, VOCAB = 3, 100
SETTINGS = StageSettings(max_rows=8, max_seqs=4, max_logit_rows=3, max_context=64)


def new_queue(*, takes_tokens: bool) -> StepQueue:
    return StepQueue(EPOCH, SETTINGS, takes_tokens=takes_tokens, hidden=HIDDEN, vocab_size=VOCAB)


def plan(step: int, *pieces: tuple[int, int, SliceInput], epoch: Epoch = EPOCH) -> StepPlan:
    """Pieces are (sequence, position, input)."""
    slices = tuple(
        SeqSlice(SeqId(seq), pos, len(source.ids) if isinstance(source, Tokens) else 1, source, ((),), True)
        for seq, pos, source in pieces
    )
    return StepPlan(epoch, StepId(step), slices)


def prefill(step: int, seq: int = 0) -> StepPlan:
    return plan(step, (seq, 0, Tokens((7, 8))))


def decode(step: int, seq: int = 0, pos: int = 2) -> StepPlan:
    return plan(step, (seq, pos, FromSample(StepId(step - 1), 0)))


def done(step: int, *tokens: tuple[int, int, int], epoch: Epoch = EPOCH) -> StepDone:
    """Tokens are (sequence, position, token)."""
    return StepDone(epoch, StepId(step), tuple(SampledToken(SeqId(seq), pos, token) for seq, pos, token in tokens))


def frame(of: StepPlan, value: float = 1.0) -> pb.Frame:
    raw = encode_frame(of, np.full((of.num_rows, HIDDEN), value, np.float32), "f32")
    return pb.FramesRequest.FromString(raw).frame


def loan(first: int = 0, lasts: int = 1) -> Loan:
    """Of a device that nobody asks."""
    backend = ReferenceBackend()
    return Loan(backend, backend.alloc((8,), DType.I32), 8, first=first, lasts=lasts)


def drain(queue: StepQueue) -> list[ReadyStep]:
    ready = []
    while (step := queue.pop_ready()) is not None:
        ready.append(step)
    return ready


def ids(steps: list[ReadyStep]) -> list[list[int]]:
    return [[] if step.tokens is None else step.tokens.tolist() for step in steps]


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
    for change in ({"rows": SETTINGS.max_rows + 1}, {"hidden": 2**31}, {"payload": bytes(100)}):
        bad = frame(prefill(0))
        for name, value in change.items():
            setattr(bad, name, value)
        with pytest.raises(InvalidPlan):
            queue.add_frame(bad)
    queue.add_frame(frame(prefill(0)))


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


def held_tokens(queue: StepQueue) -> int:
    return len(queue._tokens)


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


def test_a_token_on_the_device_is_as_good_as_one_on_the_host() -> None:
    """It is named by where it lies; when it comes to the host later it is not kept for anybody."""
    queue = new_queue(takes_tokens=True)
    queue.add_plan(plan(0, (1, 0, Tokens((7,))), (2, 0, Tokens((8,)))))
    queue.add_plan(plan(1, (2, 1, FromSample(StepId(0), 1)), (3, 0, Tokens((9, 9))), (1, 1, FromSample(StepId(0), 0))))
    drain(queue)
    queue.add_lent(EPOCH, LentTokens(StepId(0), {(SeqId(1), 1): 0}, loan(first=4)))
    assert queue.pop_ready() is None, "one is nowhere yet"
    whole = LentTokens(StepId(0), {(SeqId(1), 1): 0, (SeqId(2), 1): 1}, loan(first=4))
    queue.add_lent(EPOCH, whole)
    (ready,) = drain(queue)
    assert ids([ready]) == [[-6, 9, 9, -5]]
    assert ready.lent is whole.loan
    queue.add_done(done(0, (1, 1, 50), (2, 1, 51)))
    assert held_tokens(queue) == 0
    queue.add_plan(plan(2, (1, 2, FromSample(StepId(1), 2))))
    queue.add_done(done(1, (1, 2, 52)))
    assert ids(drain(queue)) == [[52]]


def test_tokens_on_the_device_serve_as_many_steps_as_they_are_kept() -> None:
    """Micro-batches in turn: each is fed by the step before the last. One older than its loan waits for the host."""
    queue = new_queue(takes_tokens=True)
    queue.add_plan(plan(0, (1, 0, Tokens((7,)))))
    queue.add_plan(plan(1, (2, 0, Tokens((8,)))))
    queue.add_plan(plan(2, (1, 1, FromSample(StepId(0), 0))))
    queue.add_plan(plan(3, (2, 1, FromSample(StepId(1), 0)), (1, 2, FromSample(StepId(2), 0))))
    lent = [
        LentTokens(StepId(step), {(SeqId(seq), pos): step}, loan(lasts=2))
        for step, (seq, pos) in enumerate([(1, 1), (2, 1), (1, 2)])
    ]
    taken = drain(queue)
    queue.add_lent(EPOCH, lent[0])
    queue.add_lent(EPOCH, lent[1])
    taken += drain(queue)
    queue.add_lent(EPOCH, lent[2])
    taken += drain(queue)
    assert ids(taken) == [[7], [8], [-1], [-2, -3]]
    assert [ready.lent for ready in taken] == [None, None, lent[0].loan, lent[2].loan], "the newest waits for them all"
    queue.add_plan(plan(4, (3, 0, Tokens((9,)))))
    queue.add_plan(plan(5, (1, 3, FromSample(StepId(3), 1))))
    queue.add_plan(plan(6, (3, 1, FromSample(StepId(4), 0))))
    queue.add_plan(plan(7, (2, 2, FromSample(StepId(3), 0))))
    queue.add_lent(EPOCH, LentTokens(StepId(3), {(SeqId(2), 2): 0, (SeqId(1), 3): 1}, loan(lasts=2)))
    queue.add_lent(EPOCH, LentTokens(StepId(4), {(SeqId(3), 1): 2}, loan(lasts=2)))
    assert [ready.plan.step for ready in drain(queue)] == [4, 5, 6], "step 7 comes four steps after its sample"
    queue.add_done(done(3, (2, 2, 50), (1, 3, 51)))
    assert ids(drain(queue)) == [[50]]
    with pytest.raises(StaleEpoch, match="tokens of step 5"):
        queue.add_lent(Epoch(EPOCH + 1), LentTokens(StepId(5), {}, loan()))


def test_a_sequence_that_ended_leaves_nothing() -> None:
    """Not even where its last token never came to the host: an edge may break."""
    queue = new_queue(takes_tokens=True)
    queue.add_plan(plan(0, (1, 0, Tokens((7,)))))
    queue.add_plan(plan(1, (1, 1, FromSample(StepId(0), 0))))
    drain(queue)
    queue.add_lent(EPOCH, LentTokens(StepId(0), {(SeqId(1), 1): 0}, loan()))
    assert len(drain(queue)) == 1
    queue.add_edit(RemoveSequence(SeqId(1)))
    assert not queue._fed_on_device
