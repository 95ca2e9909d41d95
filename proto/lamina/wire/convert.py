"""Step contract <-> messages. Columns on the wire (see step.proto), slices in memory; a malformed message raises."""

import math
from collections.abc import Iterable
from itertools import chain, repeat
from typing import cast

from lamina.spec.errors import InvalidPlan
from lamina.spec.ids import BlockId, Epoch, SeqId, StepId
from lamina.spec.sampling import SamplingParams
from lamina.spec.step import (
    TOKEN_BYTES,
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
    from_tuple,
    pack_ids,
    unpack_ids,
)
from lamina.v1 import step_pb2 as pb
from lamina.wire.delimited import delimited, field_key

_FINISH = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.ERROR: pb.FINISH_REASON_ERROR,
}
_REASON: dict[int, FinishReason | None] = {code: reason for reason, code in _FINISH.items()}
_REASON[pb.FINISH_REASON_UNSPECIFIED] = None
_PLAN_KEY = field_key(pb.StepCommand.PLAN_FIELD_NUMBER)
_DONE_KEY = field_key(pb.FramesRequest.DONE_FIELD_NUMBER)
_COMMANDS_KEY = field_key(pb.StepsRequest.COMMANDS_FIELD_NUMBER)
_NO_DETAILS = (repeat(None), repeat(()), repeat(None), repeat(""))  # what SampledToken has by default


def plan_to_message(plan: StepPlan) -> pb.StepPlan:
    """The plan as columns."""
    # Columns are made as lists and handed over whole: appending to a repeated field costs a call into protobuf each.
    seqs, positions, counts, inputs, blocks_by_group, wanted = zip(*plan.slices, strict=True)
    token_ids: list[bytes] = []
    from_step: list[int] = []
    from_row: list[int] = []
    num_new_blocks: list[int] = []
    new_blocks: list[int] = []
    for source in inputs:
        if isinstance(source, FromSample):
            step, row = source
            from_step.append(step + 1)
            from_row.append(row)
        else:
            token_ids.append(source.packed)
            from_step.append(0)
            from_row.append(0)
    for blocks in chain.from_iterable(blocks_by_group):
        num_new_blocks.append(len(blocks))
        new_blocks += blocks
    return pb.StepPlan(
        epoch=plan.epoch,
        step=plan.step,
        seq=seqs,
        pos=positions,
        num_tokens=counts,
        want_logits=wanted,
        token_ids=b"".join(token_ids),
        from_step=from_step,
        from_row=from_row,
        num_new_blocks=num_new_blocks,
        new_blocks=new_blocks,
        block_copies=[value for copy in plan.block_copies for value in (copy.group, copy.source, copy.target)],
        num_scored=plan.num_scored,
    )


def plan_from_message(message: pb.StepPlan, num_groups: int) -> StepPlan:
    """The plan; raises InvalidPlan if its columns do not fit each other."""
    # Each column is read once: indexing a repeated field costs a call into protobuf each.
    seqs, positions, counts = list(message.seq), list(message.pos), list(message.num_tokens)
    wanted, from_step, from_row = list(message.want_logits), list(message.from_step), list(message.from_row)
    ids, block_counts, blocks = message.token_ids, list(message.num_new_blocks), list(message.new_blocks)
    size = len(seqs)
    if not (
        len(positions) == len(counts) == len(wanted) == len(from_step) == len(from_row) == size
        and len(block_counts) == size * num_groups
    ):
        raise InvalidPlan(f"plan of step {message.step}: columns of unequal length")
    inputs, num_bytes = _inputs(counts, ids, from_step, from_row)
    if num_bytes != len(ids) or len(blocks) != sum(block_counts):
        found = f"{len(ids) / TOKEN_BYTES:g} token ids and {len(blocks)} blocks"
        raise InvalidPlan(f"plan of step {message.step}: {found} do not match the slices")
    new_blocks = _new_blocks(block_counts, cast("list[BlockId]", blocks), size, num_groups)
    slices = tuple(map(from_tuple(SeqSlice), zip(seqs, positions, counts, inputs, new_blocks, wanted, strict=True)))
    copies = _copies(message) if message.block_copies else ()
    return StepPlan(Epoch(message.epoch), StepId(message.step), slices, copies, tuple(message.num_scored))


def _inputs(
    counts: list[int], ids: bytes, from_step: list[int], from_row: list[int]
) -> tuple[list[Tokens | FromSample], int]:
    """Of every slice: the next `count` of the ids, or the sample that it names; and the bytes of ids it takes."""
    inputs: list[Tokens | FromSample] = []
    new_tokens, new_sample = from_tuple(Tokens), from_tuple(FromSample)
    start = 0
    for count, step, row in zip(counts, from_step, from_row, strict=True):
        if step:
            inputs.append(new_sample((step - 1, row)))
        else:
            end = start + count * TOKEN_BYTES
            inputs.append(new_tokens((ids[start:end],)))
            start = end
    return inputs, start


def _copies(message: pb.StepPlan) -> tuple[BlockCopy, ...]:
    copies = list(message.block_copies)
    if len(copies) % 3:
        raise InvalidPlan(f"plan of step {message.step}: block copies are not triples")
    return tuple(BlockCopy(copies[i], BlockId(copies[i + 1]), BlockId(copies[i + 2])) for i in range(0, len(copies), 3))


def _new_blocks(
    counts: list[int], blocks: list[BlockId], num_slices: int, num_groups: int
) -> list[tuple[tuple[BlockId, ...], ...]]:
    """Of every slice, by group; most decode slices have none, and share one empty value."""
    if not blocks:
        return [((),) * num_groups] * num_slices
    by_group: list[tuple[BlockId, ...]] = []
    start = 0
    for count in counts:
        by_group.append(tuple(blocks[start : start + count]))
        start += count
    return [tuple(by_group[i : i + num_groups]) for i in range(0, len(by_group), num_groups)]


def done_to_message(done: StepDone) -> pb.StepDone:
    """The answer to a step as columns."""
    tokens = done.tokens
    message = pb.StepDone(
        epoch=done.epoch,
        step=done.step,
        seq=[token.seq for token in tokens],
        pos=[token.pos for token in tokens],
        token=[token.token for token in tokens],
        finish=[_FINISH[token.finish] if token.finish else pb.FINISH_REASON_UNSPECIFIED for token in tokens],
        errors=[token.error for token in tokens if token.finish is FinishReason.ERROR],
        needs_relay=done.needs_relay,
        scores=done.scores,
    )
    if any(token.logprob is not None for token in tokens):
        message.logprob.extend([math.nan if token.logprob is None else token.logprob for token in tokens])
        message.top.extend([_top_to_message(token.top_logprobs) for token in tokens])
    return message


def encode_streamed_tokens(done: StepDone) -> bytes:
    """A serialised FramesRequest with as much of an answer as stage 0 needs: tokens, their sequences and positions."""
    seqs, positions, tokens, *_ = zip(*done.tokens, strict=True) if done.tokens else ((), (), ())
    unspecified = [pb.FINISH_REASON_UNSPECIFIED] * len(seqs)
    message = pb.StepDone(epoch=done.epoch, step=done.step, seq=seqs, pos=positions, token=tokens, finish=unspecified)
    return delimited(_DONE_KEY, message.SerializeToString())


def _top_to_message(top: tuple[tuple[int, float], ...]) -> pb.TopLogprobs:
    return pb.TopLogprobs(tokens=[token for token, _ in top], logprobs=[logprob for _, logprob in top])


def done_from_message(message: pb.StepDone) -> StepDone:
    """The answer; raises InvalidPlan if its columns do not fit each other."""
    seqs, positions, ids, codes = list(message.seq), list(message.pos), list(message.token), list(message.finish)
    if not len(positions) == len(ids) == len(codes) == len(seqs):
        raise _unequal(message)
    details: Iterable[Iterable[object]] = _NO_DETAILS
    if any(codes) or message.logprob or message.top or message.errors:
        details = zip(*_details(message, codes), strict=True)
    tokens = tuple(map(from_tuple(SampledToken), zip(seqs, positions, ids, *details, strict=False)))
    return StepDone(Epoch(message.epoch), StepId(message.step), tokens, message.needs_relay, tuple(message.scores))


def _unequal(message: pb.StepDone) -> InvalidPlan:
    return InvalidPlan(f"answer to step {message.step}: columns of unequal length")


_Detail = tuple[float | None, tuple[tuple[int, float], ...], FinishReason | None, str]


def _details(message: pb.StepDone, codes: "list[pb.FinishReason.ValueType]") -> list[_Detail]:
    """(log-probability, likeliest tokens, finish, error) of every token, of an answer in which not all are absent."""
    if (
        len(message.errors) != codes.count(pb.FINISH_REASON_ERROR)
        or len(message.logprob) not in (0, len(codes))
        or len(message.top) != len(message.logprob)
        or any(len(top.tokens) != len(top.logprobs) for top in message.top)
    ):
        raise _unequal(message)
    if unknown := set(codes) - _REASON.keys():
        raise InvalidPlan(f"answer to step {message.step}: finish reason {min(unknown)} is unknown")
    finishes = [_REASON[code] for code in codes]
    logprobs: list[float] = list(message.logprob) or [math.nan] * len(finishes)
    tops: list[pb.TopLogprobs | None] = [*message.top] or [None] * len(finishes)
    errors = iter(message.errors)
    details: list[_Detail] = []
    for logprob, top, finish in zip(logprobs, tops, finishes, strict=True):
        error = next(errors) if finish is FinishReason.ERROR else ""
        if top is None or math.isnan(logprob):
            details.append((None, (), finish, error))
        else:
            details.append((logprob, tuple(zip(top.tokens, top.logprobs, strict=True)), finish, error))
    return details


def sampling_to_message(params: SamplingParams) -> pb.Sampling:
    """Field for field."""
    return pb.Sampling(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        typical_p=params.typical_p,
        top_n_sigma=params.top_n_sigma,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        penalty_window=params.penalty_window,
        logit_bias=[pb.LogitBias(token=token, bias=bias) for token, bias in params.logit_bias.items()],
        seed=params.seed,
        num_logprobs=params.num_logprobs,
    )


def sampling_from_message(message: pb.Sampling) -> SamplingParams:
    """Field for field; raises InvalidRequest for a value out of range."""
    return SamplingParams(
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p,
        min_p=message.min_p,
        typical_p=message.typical_p,
        top_n_sigma=message.top_n_sigma,
        repetition_penalty=message.repetition_penalty,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        penalty_window=message.penalty_window,
        logit_bias={entry.token: entry.bias for entry in message.logit_bias},
        seed=message.seed,
        num_logprobs=message.num_logprobs,
    )


def command_to_message(command: StepCommand) -> pb.StepCommand:
    """One command of the coordinator's Steps stream."""
    match command:
        case StepPlan():
            return pb.StepCommand(plan=plan_to_message(command))
        case AddSequence():
            return pb.StepCommand(add_sequence=_addition_to_message(command))
        case RemoveSequence(seq):
            return pb.StepCommand(remove_sequence=pb.RemoveSequence(seq=seq))
        case SampleToken(epoch, seq, pos, token):
            return pb.StepCommand(sample_token=pb.SampleToken(epoch=epoch, seq=seq, pos=pos, token=token))


def encode_command(command: StepCommand) -> bytes:
    """A StepsRequest with this one command, serialised. Several, joined in order, are one StepsRequest of them all."""
    # Not by way of messages: protobuf copies one to put it into another.
    if type(command) is StepPlan:
        body = delimited(_PLAN_KEY, plan_to_message(command).SerializeToString())
    else:
        body = command_to_message(command).SerializeToString()
    return delimited(_COMMANDS_KEY, body)


def command_from_message(message: pb.StepCommand, num_groups: int) -> StepCommand:
    """One command; raises InvalidPlan or InvalidRequest if it is malformed."""
    match message.WhichOneof("body"):
        case "plan":
            return plan_from_message(message.plan, num_groups)
        case "add_sequence":
            return _addition_from_message(message.add_sequence)
        case "remove_sequence":
            return RemoveSequence(SeqId(message.remove_sequence.seq))
        case "sample_token":
            sample = message.sample_token
            return SampleToken(Epoch(sample.epoch), SeqId(sample.seq), sample.pos, sample.token)
        case _:
            raise InvalidPlan("an empty command on a Steps stream")


def _addition_to_message(add: AddSequence) -> pb.AddSequence:
    return pb.AddSequence(
        seq=add.seq,
        sampling=sampling_to_message(add.sampling),
        history_ids=pack_ids(add.history_ids),
        num_generated=add.num_generated,
        choice=add.choice,
        stop_ids=sorted(add.stop_ids),
        max_tokens=add.max_tokens,
        grammar=add.grammar,
        num_omitted=add.num_omitted,
    )


def _addition_from_message(message: pb.AddSequence) -> AddSequence:
    num_ids, rest = divmod(len(message.history_ids), TOKEN_BYTES)
    if rest:
        raise InvalidPlan(f"sequence {message.seq}: a history of {len(message.history_ids)} bytes is no list of ids")
    if message.num_generated > message.num_omitted + num_ids:
        held = f"{num_ids} after {message.num_omitted} omitted ones"
        raise InvalidPlan(f"sequence {message.seq}: {message.num_generated} generated tokens in a history of {held}")
    return AddSequence(
        seq=SeqId(message.seq),
        sampling=sampling_from_message(message.sampling),
        history_ids=unpack_ids(message.history_ids),
        stop_ids=frozenset(message.stop_ids),
        max_tokens=message.max_tokens,
        num_generated=message.num_generated,
        choice=message.choice,
        grammar=message.grammar,
        num_omitted=message.num_omitted,
    )
