"""One choice on its way out: tokens in, text out. Stop strings, thoughts, tool calls, logprobs, statistics.

Owned by the coordinator's loop; one object per sequence. This is the token path: no allocation that is not needed.
"""

import time

from lamina.coordinator.api.generation import (
    ChoiceStats,
    Delta,
    Finished,
    GenerationRequest,
    TokenLogprob,
    ToolCall,
)
from lamina.coordinator.engine.sequence import RequestRecord, TokenEvent
from lamina.coordinator.text.detokenizer import Detokenizer
from lamina.coordinator.text.stop import StopMatcher
from lamina.coordinator.text.tokenizer import Tokenizer
from lamina.spec import errors
from lamina.spec.step import FinishReason


class Choice:
    """`push` every TokenEvent; once `finished` is set nothing more is wanted."""

    def __init__(
        self,
        index: int,
        request: GenerationRequest,
        stop_ids: frozenset[int],
        tokenizer: Tokenizer,
        record: RequestRecord,
    ) -> None:
        self.index = index
        self.record = record
        self.finished: Finished | None = None
        self.num_tokens = 0
        self._stop_ids = stop_ids
        self._wanted_stop_ids = request.stop_ids
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopMatcher(request.stop_strings) if request.stop_strings else None
        self._parser = request.make_tool_parser() if request.make_tool_parser else None
        self._splitter = request.make_reasoning_splitter() if request.make_reasoning_splitter else None
        self._wants_logprobs = request.sampling.num_logprobs >= 0
        self._num_calls = 0

    def push(self, event: TokenEvent) -> Delta | None:
        """What can be shown now. Raises the error that ended the sequence."""
        finish = event.finish
        if finish is FinishReason.ERROR:
            raise error_of(event.error)
        self.num_tokens += 1
        stop: str | int | None = None
        if finish is FinishReason.STOP and event.token in self._stop_ids:
            stop, text = event.token if event.token in self._wanted_stop_ids else None, ""
        else:
            text = self._detokenizer.push((event.token,))
        if finish is not None:
            text += self._detokenizer.flush()
        if self._stops is not None:
            text, found = self._stops.push(text)
            if found is not None:
                stop, finish = found, FinishReason.STOP
            elif finish is not None:
                text += self._stops.flush()
        calls: tuple[ToolCall, ...] = ()
        reasoning = ""
        if self._splitter is not None:
            reasoning, text = self._split(text, at_end=finish is not None)
        if self._parser is not None:
            text, calls = self._parse(text, at_end=finish is not None)
        if finish is not None:
            self._finish(finish, stop)
        if self._wants_logprobs and event.logprob is not None:
            return Delta(self.index, text, (TokenLogprob(event.token, event.logprob, event.top),), calls, reasoning)
        return Delta(self.index, text, (), calls, reasoning) if text or calls or reasoning else None

    def stats(self) -> ChoiceStats:
        """So far; complete once the choice has finished."""
        record = self.record
        scheduled, first, last = record.scheduled_s, record.first_token_s, record.finished_s
        if last is None:  # a stop string ended it
            last = time.monotonic()
        return ChoiceStats(
            num_prompt_tokens=record.num_prompt_tokens,
            num_cached_tokens=record.num_cached_tokens,
            num_tokens=self.num_tokens,
            queue_s=None if scheduled is None else scheduled - record.queued_s,
            prefill_s=None if scheduled is None or first is None else first - scheduled,
            decode_s=None if first is None else last - first,
        )

    def _split(self, text: str, *, at_end: bool) -> tuple[str, str]:
        assert self._splitter is not None
        reasoning, answer = self._splitter.push(text)
        if at_end:
            last_reasoning, rest = self._splitter.finish()
            reasoning, answer = reasoning + last_reasoning, answer + rest
        return reasoning, answer

    def _parse(self, text: str, *, at_end: bool) -> tuple[str, tuple[ToolCall, ...]]:
        assert self._parser is not None
        text, calls = self._parser.push(text)
        if at_end:
            rest, last_calls = self._parser.finish()
            text, calls = text + rest, calls + last_calls
        self._num_calls += len(calls)
        return text, calls

    def _finish(self, finish: FinishReason, stop: str | int | None) -> None:
        reason = "tool_calls" if self._num_calls and finish is FinishReason.STOP else finish.value
        self.finished = Finished(self.index, reason, self.stats(), stop)


def error_of(text: str) -> errors.LaminaError:
    """The error behind `TypeName: message`, as the last stage reports it."""
    name, _, message = text.partition(": ")
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, errors.LaminaError):
        return kind(message)
    return errors.LaminaError(text)
