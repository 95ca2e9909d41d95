"""Step messages: whatever is sent comes back as it was, and whatever is malformed is an InvalidPlan (P-15)."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lamina.spec.errors import InvalidPlan, LaminaError
from lamina.spec.ids import BlockId, Epoch, SeqId, StepId
from lamina.spec.sampling import SamplingParams
from lamina.spec.step import (
    MAX_RUN_AHEAD,
    AddSequence,
    BlockCopy,
    FinishReason,
    FromSample,
    RemoveSequence,
    SampledToken,
    SampleToken,
    SeqSlice,
    StepCommand,
    StepDone,
    StepPlan,
    Tokens,
    pack_ids,
)
from lamina.v1 import step_pb2 as pb
from lamina.wire.convert import (
    command_from_message,
    command_to_message,
    done_from_message,
    done_to_message,
    encode_command,
    encode_streamed_tokens,
    plan_from_message,
    plan_to_message,
)

U32 = st.one_of(st.integers(0, 40), st.integers(0, 2**32 - 1), st.just(2**32 - 1))
U64 = st.one_of(st.integers(0, 40), st.integers(0, 2**64 - 1), st.just(2**64 - 1))
FLOAT32 = st.floats(-100, 100, width=32)
TEXT = st.text(max_size=20)


@st.composite
def seq_slices(draw: st.DrawFn, step: int, num_groups: int, seq: int) -> SeqSlice:
    num_tokens = draw(st.integers(1, 5))
    source: Tokens | FromSample = Tokens(tuple(draw(U32) for _ in range(num_tokens)))
    if step and draw(st.booleans()):
        num_tokens = 1
        back = draw(st.integers(1, min(step, MAX_RUN_AHEAD)))
        source = FromSample(StepId(step - back), draw(U32))
    blocks = tuple(tuple(BlockId(b) for b in draw(st.lists(U32, max_size=3))) for _ in range(num_groups))
    return SeqSlice(SeqId(seq), draw(U32), num_tokens, source, blocks, draw(st.booleans()))


@st.composite
def plans(draw: st.DrawFn, num_groups: int) -> StepPlan:
    step = draw(st.one_of(st.integers(0, 100), st.just(2**64 - 2)))
    seqs = draw(st.lists(U64, min_size=1, max_size=4, unique=True))
    slices = tuple(draw(seq_slices(step, num_groups, seq)) for seq in seqs)
    copies = st.builds(BlockCopy, U32, U32.map(BlockId), U32.map(BlockId))
    num_scored: tuple[int, ...] = ()
    if draw(st.booleans()):
        num_scored = tuple(draw(st.integers(0, piece.num_tokens - piece.want_logits)) for piece in slices)
    return StepPlan(Epoch(draw(U64)), StepId(step), slices, tuple(draw(st.lists(copies, max_size=3))), num_scored)


@st.composite
def sampled_tokens(draw: st.DrawFn, with_logprobs: bool) -> SampledToken:
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    if with_logprobs and draw(st.booleans()):
        logprob = draw(FLOAT32)
        top = tuple(draw(st.lists(st.tuples(U32, FLOAT32), max_size=3)))
    finish = draw(st.sampled_from([None, *FinishReason]))
    error = draw(TEXT) if finish is FinishReason.ERROR else ""
    return SampledToken(SeqId(draw(U64)), draw(U32), draw(U32), logprob, top, finish, error)


@st.composite
def answers(draw: st.DrawFn) -> StepDone:
    tokens = draw(st.lists(sampled_tokens(draw(st.booleans())), max_size=4))
    scores = tuple(draw(st.lists(FLOAT32, max_size=3)))
    return StepDone(Epoch(draw(U64)), StepId(draw(U64)), tuple(tokens), draw(st.booleans()), scores)


SAMPLING = st.builds(
    SamplingParams,
    temperature=st.floats(0, 10, width=32),
    top_k=st.integers(0, 2**32 - 1),
    top_p=st.floats(2**-20, 1, width=32),
    min_p=st.floats(0, 1, width=32),
    typical_p=st.floats(2**-20, 1, width=32),
    top_n_sigma=st.floats(0, 10, width=32),
    repetition_penalty=st.floats(2**-10, 10, width=32),
    presence_penalty=st.floats(-2, 2, width=32),
    frequency_penalty=st.floats(-2, 2, width=32),
    penalty_window=st.integers(-1, 2**31 - 1),
    logit_bias=st.dictionaries(U32, FLOAT32, max_size=3),
    seed=U64,
    num_logprobs=st.integers(-1, 20),
)


@st.composite
def additions(draw: st.DrawFn) -> AddSequence:
    history, omitted = tuple(draw(st.lists(U32, max_size=6))), draw(st.integers(0, 9))
    return AddSequence(
        SeqId(draw(U64)),
        draw(SAMPLING),
        history,
        frozenset(draw(st.lists(U32, max_size=3))),
        draw(U32),
        draw(st.integers(0, len(history) + omitted)),
        draw(U32),
        draw(TEXT),
        omitted,
    )


COMMANDS = st.one_of(
    plans(2),
    additions(),
    st.builds(RemoveSequence, U64.map(SeqId)),
    st.builds(SampleToken, U64.map(Epoch), U64.map(SeqId), U32, U32),
)


@given(COMMANDS)
def test_commands_come_back(command: StepCommand) -> None:
    message = pb.StepCommand.FromString(command_to_message(command).SerializeToString())
    assert command_from_message(message, 2) == command


@given(st.lists(COMMANDS, max_size=4))
def test_encoded_commands_that_are_joined_are_one_request(commands: list[StepCommand]) -> None:
    request = pb.StepsRequest.FromString(b"".join(map(encode_command, commands)))
    assert not request.HasField("open")
    assert [command_from_message(message, 2) for message in request.commands] == commands


@given(answers())
def test_answers_come_back(done: StepDone) -> None:
    assert done_from_message(pb.StepDone.FromString(done_to_message(done).SerializeToString())) == done


@given(answers())
def test_what_stage_0_needs_of_an_answer(done: StepDone) -> None:
    """Its tokens, without the details that go to the coordinator."""
    message = pb.FramesRequest.FromString(encode_streamed_tokens(done))
    found = done_from_message(message.done)
    wanted = [(token.seq, token.pos, token.token) for token in done.tokens]
    assert (found.epoch, found.step) == (done.epoch, done.step)
    assert found.tokens == tuple(SampledToken(*token) for token in wanted)
    assert not found.scores


def test_a_logprob_may_be_missing_beside_others() -> None:
    """One sequence asked for logprobs, its neighbour did not: None stays None, the value is float32's."""
    asked = SampledToken(SeqId(1), 4, 7, -0.1, ((7, -0.1), (3, -2.5)))
    done = StepDone(Epoch(1), StepId(9), (asked, SampledToken(SeqId(2), 5, 8)))
    first, second = done_from_message(done_to_message(done)).tokens
    assert first.logprob == np.float32(-0.1)
    assert first.top_logprobs == ((7, float(np.float32(-0.1))), (3, -2.5))
    assert second.logprob is None
    assert second.top_logprobs == ()


PLAN = StepPlan(
    Epoch(3),
    StepId(5),
    (
        SeqSlice(SeqId(1), 0, 2, Tokens((10, 11)), ((BlockId(4),),), False),
        SeqSlice(SeqId(2), 17, 1, FromSample(StepId(4), 0), ((),), True),
    ),
    (BlockCopy(0, BlockId(1), BlockId(2)),),
    (2, 0),
)
REPEATED = [field.name for field in pb.StepPlan.DESCRIPTOR.fields if field.is_repeated]


@pytest.mark.parametrize("name", REPEATED)
@pytest.mark.parametrize("change", ["shorter", "longer"])
def test_plan_columns_of_unequal_length(name: str, change: str) -> None:
    """Every column one entry short or long is refused, block_copies as no triples."""
    message = plan_to_message(PLAN)
    column = getattr(message, name)
    if change == "longer":
        column.append(1)
    else:
        del column[-1]
    with pytest.raises(InvalidPlan, match=r"step 5"):
        plan_from_message(message, 1)


@pytest.mark.parametrize("num_bytes", [0, 4, 7, 9, 12])
def test_plan_with_too_few_or_too_many_token_ids(num_bytes: int) -> None:
    message = plan_to_message(PLAN)
    message.token_ids = bytes(num_bytes)
    with pytest.raises(InvalidPlan, match=r"step 5: .* token ids and 1 blocks do not match"):
        plan_from_message(message, 1)


@pytest.mark.parametrize("num_groups", [0, 2, 3])
def test_plan_for_another_number_of_cache_groups(num_groups: int) -> None:
    with pytest.raises(InvalidPlan, match="unequal length"):
        plan_from_message(plan_to_message(PLAN), num_groups)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda m: m.seq.__setitem__(1, 1), "names a sequence twice"),
        (lambda m: m.num_tokens.__setitem__(1, 2), "a sampled input is one token"),
        (lambda m: m.num_tokens.__setitem__(0, 2**32 - 1), "token ids"),
        (lambda m: m.num_new_blocks.__setitem__(0, 2**32 - 1), "blocks do not match"),
        (lambda m: m.from_step.__setitem__(1, 6), "refers to step 5"),
        (lambda m: m.from_step.__setitem__(1, 2**64 - 1), "refers to step"),
        (lambda m: setattr(m, "step", 4 + 1 + MAX_RUN_AHEAD), "refers to step 4"),
        (lambda m: m.num_scored.__setitem__(0, 3), "3 scored rows in 2 tokens"),
        (lambda m: m.num_scored.__setitem__(1, 1), "1 scored rows in 1 tokens"),  # the one row is sampled
        (lambda m: m.Clear(), "columns|no slices"),
    ],
)
def test_contradictory_plans(change: object, said: str) -> None:
    message = plan_to_message(PLAN)
    assert callable(change)
    change(message)
    with pytest.raises(InvalidPlan, match=said):
        plan_from_message(message, 1)


DONE = StepDone(
    Epoch(1),
    StepId(5),
    (
        SampledToken(SeqId(1), 3, 4, -0.5, ((4, -0.5),)),
        SampledToken(SeqId(2), 6, 0, None, (), FinishReason.ERROR, "NumericalError: x"),
    ),
)


# `scores` is no column of the tokens: it has the plan's number of scored rows.
DONE_COLUMNS = [f.name for f in pb.StepDone.DESCRIPTOR.fields if f.is_repeated and f.name != "scores"]


@pytest.mark.parametrize("name", DONE_COLUMNS)
@pytest.mark.parametrize("change", ["shorter", "longer"])
def test_answer_columns_of_unequal_length(name: str, change: str) -> None:
    message = done_to_message(DONE)
    column = getattr(message, name)
    if change == "shorter":
        del column[-1]
    elif name == "top":
        column.add()
    else:
        column.append("x" if name == "errors" else 1)
    with pytest.raises(InvalidPlan, match="step 5"):
        done_from_message(message)


def test_answer_with_an_unknown_finish_reason() -> None:
    message = done_to_message(DONE)
    message.finish[0] = 77  # proto3 enums are open
    with pytest.raises(InvalidPlan, match="finish reason 77"):
        done_from_message(message)


def test_answer_whose_top_logprobs_are_no_pairs() -> None:
    message = done_to_message(DONE)
    message.top[0].tokens.append(9)
    with pytest.raises(InvalidPlan, match="unequal length"):
        done_from_message(message)


def test_more_generated_tokens_than_history() -> None:
    add = AddSequence(SeqId(1), SamplingParams(), (1, 2), frozenset(), 5)
    message = command_to_message(replace(add, num_generated=2))
    message.add_sequence.num_generated = 3
    with pytest.raises(InvalidPlan, match="3 generated tokens in a history of 2"):
        command_from_message(message, 1)
    message.add_sequence.num_omitted = 1
    assert command_from_message(message, 1) == replace(add, num_generated=3, num_omitted=1)


def test_a_history_that_is_no_list_of_ids() -> None:
    message = command_to_message(AddSequence(SeqId(1), SamplingParams(), (1, 2), frozenset(), 5))
    message.add_sequence.history_ids += b"x"
    with pytest.raises(InvalidPlan, match="a history of 9 bytes"):
        command_from_message(message, 1)


def test_a_value_out_of_range_is_refused() -> None:
    message = command_to_message(AddSequence(SeqId(1), SamplingParams(), (1,), frozenset(), 5))
    message.add_sequence.sampling.temperature = math.nan
    with pytest.raises(LaminaError, match="temperature"):
        command_from_message(message, 1)


@pytest.mark.parametrize("name", ["top_p", "min_p", "typical_p", "repetition_penalty", "top_n_sigma"])
@pytest.mark.parametrize("value", [2**-30, 1e-9, 2**-14, 1e-4, 0.1, 0.999999999999, 2**14, 9999.99999999999, 1e4])
def test_what_was_accepted_is_accepted_off_the_wire_though_it_was_rounded(name: str, value: float) -> None:
    try:
        params = SamplingParams(**{name: value})
    except LaminaError:
        return
    sent = command_to_message(AddSequence(SeqId(1), params, (1,), frozenset(), 5))
    received = command_from_message(sent, 1)
    assert isinstance(received, AddSequence)
    assert getattr(received.sampling, name) == np.float32(value)


RANDOM_PLAN = st.builds(
    pb.StepPlan,
    epoch=U64,
    step=U64,
    seq=st.lists(U64, max_size=3),
    pos=st.lists(U32, max_size=3),
    num_tokens=st.lists(U32, max_size=3),
    want_logits=st.lists(st.booleans(), max_size=3),
    token_ids=st.one_of(st.lists(U32, max_size=4).map(pack_ids), st.binary(max_size=9)),
    from_step=st.lists(U64, max_size=3),
    from_row=st.lists(U32, max_size=3),
    num_new_blocks=st.lists(U32, max_size=4),
    new_blocks=st.lists(U32, max_size=4),
    block_copies=st.lists(U32, max_size=6),
)
RANDOM_DONE = st.builds(
    pb.StepDone,
    seq=st.lists(U64, max_size=3),
    pos=st.lists(U32, max_size=3),
    token=st.lists(U32, max_size=3),
    logprob=st.lists(st.floats(width=32), max_size=3),
    top=st.lists(st.builds(pb.TopLogprobs, tokens=st.lists(U32, max_size=2)), max_size=3),
    finish=st.lists(st.integers(0, 5), max_size=3),
    errors=st.lists(TEXT, max_size=2),
)


@given(RANDOM_PLAN, st.integers(1, 3))
def test_random_plans_are_read_or_refused(message: pb.StepPlan, num_groups: int) -> None:
    """Never an IndexError or the like, and nothing is built from a count that the message does not carry."""
    try:
        plan = plan_from_message(message, num_groups)
    except InvalidPlan:
        return
    assert plan_to_message(plan) == message


@given(RANDOM_DONE)
def test_random_answers_are_read_or_refused(message: pb.StepDone) -> None:
    try:
        done = done_from_message(message)
    except InvalidPlan:
        return
    assert len(done.tokens) == len(message.seq)


@settings(max_examples=300)
@given(st.binary(max_size=60))
def test_random_bytes_are_read_or_refused(raw: bytes) -> None:
    """Whatever parses as a message is a command or a LaminaError."""
    try:
        message = pb.StepCommand.FromString(raw)
    except Exception:  # protobuf's own refusal
        return
    try:
        command_from_message(message, 1)
    except LaminaError:
        return
