"""A step queue and what is brought to it, in few words: plans, answers, frames of a small placement."""

import numpy as np

from lamina.rpc_worker.step_queue import ReadyStep, StepQueue
from lamina.spec.ids import Epoch, SeqId, StepId
from lamina.spec.placement import StageSettings
from lamina.spec.step import FromSample, SampledToken, SeqSlice, SliceInput, StepDone, StepPlan, Tokens
from lamina.v1 import step_pb2 as pb
from lamina.wire.frames import Frame, encode_frame, read_frame

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


def frame(of: StepPlan, value: float = 1.0) -> Frame:
    raw = encode_frame(of, np.full((of.num_rows, HIDDEN), value, np.float32), "f32")
    return read_frame(pb.FramesRequest.FromString(raw).frame)


def drain(queue: StepQueue) -> list[ReadyStep]:
    ready = []
    while (step := queue.pop_ready()) is not None:
        ready.append(step)
    return ready


def ids(steps: list[ReadyStep]) -> list[list[int]]:
    return [[] if step.tokens is None else step.tokens.tolist() for step in steps]


def held_tokens(queue: StepQueue) -> int:
    return len(queue._tokens)
