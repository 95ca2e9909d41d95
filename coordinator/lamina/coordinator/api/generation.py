"""The one vocabulary of generation: every wire API converts its requests to these and these events to its answers.

Pure values. Knows no HTTP, no JSON, no scheduling.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from lamina.spec.errors import LaminaError
from lamina.spec.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model wants made; `arguments` is a JSON object as text."""

    id: str
    name: str
    arguments: str


class ToolCallParser(Protocol):
    """What separates tool calls from text as it streams. One belongs to one choice."""

    def push(self, text: str) -> tuple[str, tuple[ToolCall, ...]]:
        """(text that may be shown now, calls that are complete now)."""

    def finish(self) -> tuple[str, tuple[ToolCall, ...]]:
        """What is still held back, at the end of the text."""


class ReasoningSplitter(Protocol):
    """What separates a model's thoughts from its answer as they stream. One belongs to one choice."""

    def push(self, text: str) -> tuple[str, str]:
        """(thought, answer) that may be shown now."""

    def finish(self) -> tuple[str, str]:
        """What is still held back, at the end of the text."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """`num_choices` continuations of each prompt (token ids). Choice i of prompt p has index p * num_choices + i."""

    prompts: tuple[tuple[int, ...], ...]
    sampling: SamplingParams
    num_choices: int = 1
    max_tokens: int | None = None  # None = what the context leaves
    stop_strings: tuple[str, ...] = ()
    stop_ids: frozenset[int] = frozenset()  # beside the model's own ends of text
    ignore_eos: bool = False
    grammar: str = ""
    cache_salt: str = ""
    make_tool_parser: Callable[[], ToolCallParser] | None = None
    make_reasoning_splitter: Callable[[], ReasoningSplitter] | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A sampled token with its log-probability, and the most likely ones, highest first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class ChoiceStats:
    """What one choice took. Seconds are durations; None where it never came to it."""

    num_prompt_tokens: int
    num_cached_tokens: int
    num_tokens: int
    queue_s: float | None
    prefill_s: float | None  # from its first step to its first token
    decode_s: float | None  # from its first token to its last


@dataclass(frozen=True, slots=True)
class Started:
    """The request was taken; nothing has been computed yet."""


@dataclass(frozen=True, slots=True)
class Delta:
    """More of one choice. With logprobs there is a Delta for every token, its text possibly ""."""

    choice: int
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of one choice. reason: stop, length or tool_calls; `stop` is the request's own stop that was met."""

    choice: int
    reason: str
    stats: ChoiceStats
    stop: str | int | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """The end of the whole request."""

    error: LaminaError


GenerationEvent = Started | Delta | Finished | Failed
