"""Tool calls: how a model family writes them, how to force one, how to find them in its text.

A family is a row of FORMATS, recognised by its chat template. A template without tools gets them in a system message,
in the way most open models were trained on (Hermes). Knows no HTTP.
"""

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lamina.coordinator.api.generation import ToolCall
from lamina.coordinator.api.grammar import embedded_schema, lark_grammar
from lamina.spec.errors import InvalidRequest

Tool = Mapping[str, object]  # {"type": "function", "function": {"name", "description", "parameters", "strict"}}
Message = Mapping[str, object]

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a family writes a call: a JSON object with name and arguments, between two texts."""

    name: str
    opening: str  # "" = the answer as a whole is the call
    closing: str
    arguments_key: str
    signs: tuple[str, ...]  # all of them stand in the family's templates


FORMATS = (
    ToolFormat(
        "hermes", "<tool_call>", "</tool_call>", "arguments", ("<tool_call>", "tools")
    ),  # Qwen2.5, Qwen3, Hermes
    ToolFormat("llama3", "", "", "parameters", ("<|start_header_id|>", "tools", "parameters")),  # Llama 3.1 to 3.3
)
_GENERIC = ToolFormat("generic", "<tool_call>", "</tool_call>", "arguments", ())
_INSTRUCTION = (
    "You may call one or more functions to assist with the user query.\n\nThe functions, as JSON:\n<tools>\n{tools}\n"
    "</tools>\n\nTo call a function, answer with its name and arguments as JSON:\n"
    '<tool_call>\n{{"name": "function name", "arguments": {{…}}}}\n</tool_call>'
)


def format_of(template: str) -> ToolFormat:
    """The family's format, by its chat template; the generic one if the template knows no tools."""
    for candidate in FORMATS:
        if all(sign in template for sign in candidate.signs):
            return candidate
    return _GENERIC


def check_tools(tools: Sequence[Tool]) -> dict[str, Tool]:
    """The functions by name. Raises InvalidRequest that names the tool by its place."""
    functions: dict[str, Tool] = {}
    for index, tool in enumerate(tools):
        function = tool.get("function") if tool.get("type") == "function" else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(name, str) or not _NAME.fullmatch(name):
            raise InvalidRequest(f"tools[{index}] must be a function with a name of letters, digits, _ . - (1 to 64)")
        if not isinstance(function.get("parameters", {}), Mapping):
            raise InvalidRequest(f"tools[{index}].function.parameters must be a JSON schema object")
        if name in functions:
            raise InvalidRequest(f"tools[{index}]: two tools are called {name!r}")
        functions[name] = function
    return functions


def forced_call_grammar(form: ToolFormat, functions: Mapping[str, Tool], *, several: bool) -> str:
    """A grammar of one call (or `several`, one after the other) of one of the functions. Raises InvalidRequest."""
    lines = ['start: call ("\\n" call)*' if several and form.opening else "start: call"]
    lines.append("call: " + " | ".join(f"call_{i}" for i in range(len(functions))))
    before = f"{form.opening}\n" if form.opening else ""
    after = f"\n{form.closing}" if form.closing else ""
    for i, (name, function) in enumerate(functions.items()):
        head = f'{before}{{"name": {json.dumps(name)}, {json.dumps(form.arguments_key)}: '
        parameters = function.get("parameters") or {"type": "object", "properties": {}}
        assert isinstance(parameters, Mapping)
        lines.append(f"call_{i}: {json.dumps(head)} arguments_{i} {json.dumps('}' + after)}")
        lines.append(f"arguments_{i}: {embedded_schema(parameters, strict=function.get('strict') is True)}")
    return lark_grammar("\n".join(lines) + "\n")


def parse_arguments(messages: Sequence[Message]) -> list[Message]:
    """Copies in which the arguments of earlier calls are objects: templates print them as JSON themselves."""
    return [_parse_message_arguments(message) for message in messages]


def _parse_message_arguments(message: Message) -> Message:
    calls = message.get("tool_calls") if isinstance(message, Mapping) else None
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        return message
    parsed = []
    for call in calls:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            raise InvalidRequest("tool_calls of a message must be functions with name and arguments")
        parsed.append({**call, "function": {**function, "arguments": _as_object(function.get("arguments"))}})
    return {**message, "tool_calls": parsed}


def _as_object(arguments: object) -> object:
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments


def spell_out(messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
    """The conversation for a template that knows no tools: everything about them in plain messages."""
    plain: list[Message] = []
    for message in messages:
        calls = message.get("tool_calls")
        if message.get("role") == "assistant" and isinstance(calls, Sequence):
            texts = [str(message.get("content") or "")]
            texts += [
                f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>" for call in calls
            ]
            plain.append({"role": "assistant", "content": "\n".join(filter(None, texts))})
        elif message.get("role") == "tool":
            plain.append({"role": "user", "content": f"<tool_response>\n{message.get('content')}\n</tool_response>"})
        else:
            plain.append(message)
    if not tools:
        return plain
    instruction = _INSTRUCTION.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    if plain and plain[0].get("role") == "system" and isinstance(plain[0].get("content"), str):
        return [{**plain[0], "content": f"{plain[0]['content']}\n\n{instruction}"}, *plain[1:]]
    return [{"role": "system", "content": instruction}, *plain]


class TaggedCallParser:
    """Calls between an opening and a closing text; what is no call of a known function stays text."""

    def __init__(self, form: ToolFormat, names: frozenset[str]) -> None:
        self._form = form
        self._names = names
        self._held = ""
        self._inside = False
        self._gap = ""  # white space before the call that is being read: no part of the answer, unless it is no call
        self._num_calls = 0

    def push(self, text: str) -> tuple[str, tuple[ToolCall, ...]]:
        """See ToolCallParser."""
        self._held += text
        shown: list[str] = []
        calls: list[ToolCall] = []
        while True:
            mark = self._form.closing if self._inside else self._form.opening
            place = self._held.find(mark)
            if place < 0:
                break
            before, self._held = self._held[:place], self._held[place + len(mark) :]
            if self._inside:
                call = self._read(before)
                calls += [call] if call else []
                shown += [] if call else [f"{self._gap}{self._form.opening}{before}{mark}"]
            else:
                shown.append(before.rstrip())
                self._gap = before[len(shown[-1]) :]
            self._inside = not self._inside
        if not self._inside:
            keep = self._num_held()
            shown.append(self._held[: len(self._held) - keep])
            self._held = self._held[len(self._held) - keep :]
        return "".join(shown), tuple(calls)

    def finish(self) -> tuple[str, tuple[ToolCall, ...]]:
        """See ToolCallParser. A call that was not closed counts if it is complete; space after a call is no answer."""
        rest, self._held = self._held, ""
        if not self._inside:
            return ("" if self._num_calls and rest.isspace() else rest), ()
        call = self._read(rest)
        return ("", (call,)) if call else (f"{self._gap}{self._form.opening}{rest}", ())

    def _read(self, text: str) -> ToolCall | None:
        call = read_call(text, self._form, self._names)
        self._num_calls += call is not None
        return call

    def _num_held(self) -> int:
        """Length of the end that may be white space before a call and the start of the opening text."""
        text, opening = self._held, self._form.opening
        for length in range(min(len(text), len(opening) - 1), 0, -1):
            if opening.startswith(text[-length:]):
                return len(text) - len(text[:-length].rstrip())
        return len(text) - len(text.rstrip())


class WholeCallParser:
    """An answer that begins with a brace is held back: as a whole it is a call, or else text."""

    def __init__(self, form: ToolFormat, names: frozenset[str]) -> None:
        self._form = form
        self._names = names
        self._held = ""
        self._is_text = False

    def push(self, text: str) -> tuple[str, tuple[ToolCall, ...]]:
        """See ToolCallParser."""
        if self._is_text:
            return text, ()
        self._held += text
        if not self._held.strip() or self._held.lstrip().startswith("{"):
            return "", ()
        self._is_text = True
        text, self._held = self._held, ""
        return text, ()

    def finish(self) -> tuple[str, tuple[ToolCall, ...]]:
        """See ToolCallParser."""
        rest, self._held = self._held, ""
        call = read_call(rest, self._form, self._names) if rest else None
        return (rest, ()) if call is None else ("", (call,))


def make_parser(form: ToolFormat, names: frozenset[str]) -> TaggedCallParser | WholeCallParser:
    """A fresh parser for one choice."""
    return TaggedCallParser(form, names) if form.opening else WholeCallParser(form, names)


def read_call(text: str, form: ToolFormat, names: frozenset[str]) -> ToolCall | None:
    """The call in a JSON text, None if it is no call of a known function."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or value.get("name") not in names:
        return None
    arguments = value.get(form.arguments_key, value.get("arguments", value.get("parameters", {})))
    if not isinstance(arguments, dict):
        return None
    return ToolCall(f"call_{secrets.token_hex(12)}", value["name"], json.dumps(arguments, ensure_ascii=False))
