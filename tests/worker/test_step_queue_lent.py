"""The step queue of stage 0 where tokens stay on the device: what is fed from there, and for how long."""

import pytest

from lamina.kernels.buffer import DType
from lamina.kernels.reference import ReferenceBackend
from lamina.rpc_worker.loan import Loan
from lamina.rpc_worker.step_queue import LentTokens
from lamina.spec.errors import StaleEpoch
from lamina.spec.ids import Epoch, SeqId, StepId
from lamina.spec.step import FromSample, RemoveSequence, Tokens
from support.step_messages import EPOCH, done, drain, held_tokens, ids, new_queue, plan


def loan(first: int = 0, lasts: int = 1) -> Loan:
    """Of a device that nobody asks."""
    backend = ReferenceBackend()
    return Loan(backend, backend.alloc((8,), DType.I32), 8, first=first, lasts=lasts)


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
