"""Step contract <-> messages. Columns on the wire (see step.proto), slices in memory; a malformed message raises."""

import math

from lamina.spec.errors import InvalidPlan
from lamina.spec.ids import BlockId, Epoch, SeqId, StepId
from lamina.spec.sampling import SamplingParams
from lamina.spec.step import (
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
)
from lamina.v1 import step_pb2 as pb

_FINISH = {
    None: pb.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.ERROR: pb.FINISH_REASON_ERROR,
}
_REASON = {code: reason for reason, code in _FINISH.items()}


def plan_to_message(plan: StepPlan) -> pb.StepPlan:
    """The plan as columns."""
    message = pb.StepPlan(epoch=plan.epoch, step=plan.step)
    for piece in plan.slices:
        message.seq.append(piece.seq)
        message.pos.append(piece.pos)
        message.num_tokens.append(piece.num_tokens)
        message.want_logits.append(piece.want_logits)
        if isinstance(piece.input, Tokens):
            message.token_ids.extend(piece.input.ids)
            message.from_step.append(0)
            message.from_row.append(0)
        else:
            message.from_step.append(piece.input.step + 1)
            message.from_row.append(piece.input.row)
        for blocks in piece.new_blocks:
            message.num_new_blocks.append(len(blocks))
            message.new_blocks.extend(blocks)
    for copy in plan.block_copies:
        message.block_copies.extend((copy.group, copy.source, copy.target))
    return message


def plan_from_message(message: pb.StepPlan, num_groups: int) -> StepPlan:
    """The plan; raises InvalidPlan if its columns do not fit each other."""
    count = len(message.seq)
    columns = (message.pos, message.num_tokens, message.want_logits, message.from_step, message.from_row)
    where = f"plan of step {message.step}"
    if any(len(column) != count for column in columns) or len(message.num_new_blocks) != count * num_groups:
        raise InvalidPlan(f"{where}: columns of unequal length")
    if len(message.block_copies) % 3:
        raise InvalidPlan(f"{where}: block copies are not triples")
    ids, blocks = list(message.token_ids), list(message.new_blocks)
    wanted_ids = sum(n for n, step in zip(message.num_tokens, message.from_step, strict=True) if step == 0)
    if len(ids) != wanted_ids or len(blocks) != sum(message.num_new_blocks):
        raise InvalidPlan(f"{where}: {len(ids)} token ids and {len(blocks)} blocks do not match the slices")
    slices = []
    next_id = next_block = 0
    for i in range(count):
        num_tokens, new_blocks = message.num_tokens[i], []
        for group in range(num_groups):
            num_new = message.num_new_blocks[i * num_groups + group]
            new_blocks.append(tuple(BlockId(b) for b in blocks[next_block : next_block + num_new]))
            next_block += num_new
        source: Tokens | FromSample
        if message.from_step[i]:
            source = FromSample(StepId(message.from_step[i] - 1), message.from_row[i])
        else:
            source = Tokens(tuple(ids[next_id : next_id + num_tokens]))
            next_id += num_tokens
        slices.append(
            SeqSlice(
                SeqId(message.seq[i]), message.pos[i], num_tokens, source, tuple(new_blocks), message.want_logits[i]
            )
        )
    copies = list(message.block_copies)
    block_copies = tuple(
        BlockCopy(copies[i], BlockId(copies[i + 1]), BlockId(copies[i + 2])) for i in range(0, len(copies), 3)
    )
    return StepPlan(Epoch(message.epoch), StepId(message.step), tuple(slices), block_copies)


def done_to_message(done: StepDone) -> pb.StepDone:
    """The answer to a step as columns."""
    message = pb.StepDone(epoch=done.epoch, step=done.step, needs_relay=done.needs_relay)
    with_logprobs = any(token.logprob is not None for token in done.tokens)
    for token in done.tokens:
        message.seq.append(token.seq)
        message.pos.append(token.pos)
        message.token.append(token.token)
        message.finish.append(_FINISH[token.finish])
        if token.finish is FinishReason.ERROR:
            message.errors.append(token.error)
        if with_logprobs:
            message.logprob.append(float("nan") if token.logprob is None else token.logprob)
            top = message.top.add()
            top.tokens.extend(i for i, _ in token.top_logprobs)
            top.logprobs.extend(p for _, p in token.top_logprobs)
    return message


def done_from_message(message: pb.StepDone) -> StepDone:
    """The answer; raises InvalidPlan if its columns do not fit each other."""
    count = len(message.seq)
    num_errors = sum(code == pb.FINISH_REASON_ERROR for code in message.finish)
    num_logprobs = count if message.logprob else 0
    if (
        any(len(column) != count for column in (message.pos, message.token, message.finish))
        or len(message.errors) != num_errors
        or len(message.logprob) != num_logprobs
        or len(message.top) != num_logprobs
        or any(len(top.tokens) != len(top.logprobs) for top in message.top)
    ):
        raise InvalidPlan(f"answer to step {message.step}: columns of unequal length")
    unknown = next((code for code in message.finish if code not in _REASON), None)
    if unknown is not None:
        raise InvalidPlan(f"answer to step {message.step}: finish reason {unknown} is unknown")
    errors = iter(message.errors)
    tokens = []
    for i in range(count):
        finish = _REASON[message.finish[i]]
        logprob: float | None = None
        top: tuple[tuple[int, float], ...] = ()
        if num_logprobs and not math.isnan(message.logprob[i]):
            logprob = message.logprob[i]
            top = tuple(zip(message.top[i].tokens, message.top[i].logprobs, strict=True))
        error = next(errors) if finish is FinishReason.ERROR else ""
        tokens.append(
            SampledToken(SeqId(message.seq[i]), message.pos[i], message.token[i], logprob, top, finish, error)
        )
    return StepDone(Epoch(message.epoch), StepId(message.step), tuple(tokens), message.needs_relay)


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


def command_to_message(command: StepCommand) -> pb.StepsRequest:
    """One message of the coordinator's Steps stream."""
    match command:
        case StepPlan():
            return pb.StepsRequest(plan=plan_to_message(command))
        case AddSequence():
            return pb.StepsRequest(
                add_sequence=pb.AddSequence(
                    seq=command.seq,
                    sampling=sampling_to_message(command.sampling),
                    history_ids=command.history_ids,
                    num_generated=command.num_generated,
                    choice=command.choice,
                    stop_ids=sorted(command.stop_ids),
                    max_tokens=command.max_tokens,
                    grammar=command.grammar,
                )
            )
        case RemoveSequence(seq):
            return pb.StepsRequest(remove_sequence=pb.RemoveSequence(seq=seq))
        case SampleToken(epoch, seq, pos, token):
            return pb.StepsRequest(sample_token=pb.SampleToken(epoch=epoch, seq=seq, pos=pos, token=token))


def command_from_message(message: pb.StepsRequest, num_groups: int) -> StepCommand:
    """One command; raises InvalidPlan or InvalidRequest if it is malformed (an `open` is no command)."""
    match message.WhichOneof("body"):
        case "plan":
            return plan_from_message(message.plan, num_groups)
        case "add_sequence":
            add = message.add_sequence
            if add.num_generated > len(add.history_ids):
                generated, held = add.num_generated, len(add.history_ids)
                raise InvalidPlan(f"sequence {add.seq}: {generated} generated tokens in a history of {held}")
            return AddSequence(
                seq=SeqId(add.seq),
                sampling=sampling_from_message(add.sampling),
                history_ids=tuple(add.history_ids),
                stop_ids=frozenset(add.stop_ids),
                max_tokens=add.max_tokens,
                num_generated=add.num_generated,
                choice=add.choice,
                grammar=add.grammar,
            )
        case "remove_sequence":
            return RemoveSequence(SeqId(message.remove_sequence.seq))
        case "sample_token":
            sample = message.sample_token
            return SampleToken(Epoch(sample.epoch), SeqId(sample.seq), sample.pos, sample.token)
        case other:
            raise InvalidPlan(f"message {other!r} is out of order on a Steps stream")
