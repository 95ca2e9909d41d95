"""A model's chat template: messages in, one prompt text out, rendered in Jinja's immutable sandbox.

Owns the environment that published templates expect (the one of the transformers library) and the bounds on it. Knows
no tokens: chat.py keeps a user's text from becoming control tokens. A ChatTemplate never changes after it was built:
any thread may use it.

A template is a stranger's code. The sandbox keeps it from Python's internals and from changing its input; the size of
its output, of its strings and lists built by `*` and `+`, and of `range` is bounded. Its run time is not: render in the
tokenising pool, and serve only files whose template you would run.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from lamina.coordinator.text.tokenizer import DEFAULT_MAX_INPUT_CHARS, Tokenizer
from lamina.spec.errors import InvalidCheckpoint, InvalidRequest
from lamina.spec.vocabulary import read_optional

# What a file without a template gets, as in llama.cpp.
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_MAX_EXPONENT = 64
_MAX_REASON_CHARS = 300


class ChatTemplate:
    """One compiled template. `is_default` says that the file had none and chatml stands in."""

    def __init__(
        self,
        source: str,
        bos_token: str,
        eos_token: str,
        *,
        where: str = "the chat template",
        is_default: bool = False,
        max_output_chars: int = DEFAULT_MAX_INPUT_CHARS,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """Raises InvalidCheckpoint, naming `where` and the line, if `source` is not a Jinja template."""
        self.source = source
        self.is_default = is_default
        self._max_output_chars = max_output_chars
        self._special = {"bos_token": bos_token, "eos_token": eos_token}
        try:
            self._template = _make_environment(max_output_chars, now).from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise InvalidCheckpoint(
                f"{where}, line {error.lineno}: {_one_line(error)}; give another template"
            ) from error
        except RecursionError as error:
            raise InvalidCheckpoint(f"{where} is nested too deeply; give another template") from error

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, object], tokenizer: Tokenizer, where: str) -> "ChatTemplate":
        """The template in GGUF `metadata`, or chatml where there is none. Raises InvalidCheckpoint."""
        source = read_optional(metadata, "tokenizer.chat_template", str, where)
        return cls(
            CHATML if source is None else source,
            tokenizer.bos_text,
            tokenizer.eos_text,
            where=f"{where}: tokenizer.chat_template",
            is_default=source is None,
            max_output_chars=tokenizer.max_input_chars,
        )

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
        **kwargs: object,
    ) -> str:
        """The prompt text for `messages`; `kwargs` are further variables of the template.

        Raises InvalidRequest with the template's own reason if it refuses the messages, fails or prints too much.
        """
        variables = {
            **self._special,
            **kwargs,
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        pieces: list[str] = []
        num_chars = 0
        try:
            for piece in self._template.generate(variables):
                pieces.append(piece)
                num_chars += len(piece)
                if num_chars > self._max_output_chars:
                    break
        except Exception as error:  # a stranger's code raises what it likes
            raise InvalidRequest(f"the chat template refuses these messages: {_one_line(error)}") from error
        if num_chars > self._max_output_chars:
            raise InvalidRequest(f"the chat template prints more than {self._max_output_chars} characters; send less")
        return "".join(pieces)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with bounds on what one operator may build."""

    intercepted_binops = frozenset(("+", "*", "**"))

    def __init__(self, max_chars: int, **options: Any) -> None:
        super().__init__(**options)
        self._max_chars = max_chars

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            if not all(isinstance(value, int | float) and abs(value) <= self._max_chars for value in (left, right)) or (
                right > _MAX_EXPONENT
            ):
                raise jinja2.TemplateRuntimeError(f"exponents go up to {_MAX_EXPONENT}")
        else:
            sizes = [len(value) if hasattr(value, "__len__") else None for value in (left, right)]
            self._check_size(operator, sizes, left, right)
        return super().call_binop(context, operator, left, right)

    def _check_size(self, operator: str, sizes: list[int | None], left: Any, right: Any) -> None:
        match operator, sizes:
            case "+", [int(first), int(second)]:
                size = first + second
            case "*", [int(first), None]:
                size = first * right
            case "*", [None, int(second)]:
                size = left * second
            case _:
                return
        if size > self._max_chars:
            raise jinja2.TemplateRuntimeError(f"`{operator}` would build more than {self._max_chars} elements")


class _GenerationTag(Extension):
    """`{% generation %}` marks an assistant's words for training; here its body is printed as it is."""

    tags = {"generation"}  # noqa: RUF012 (jinja's declaration)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _make_environment(max_chars: int, now: Callable[[], datetime]) -> _Environment:
    environment = _Environment(
        max_chars, trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: now().strftime(pattern)
    return environment


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML characters; templates are written for plain JSON."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateRuntimeError(message)


def _one_line(error: BaseException) -> str:
    reason = " ".join(str(error).split()) or type(error).__name__
    return reason if len(reason) <= _MAX_REASON_CHARS else reason[:_MAX_REASON_CHARS] + " ..."
