"""A conversation to prompt ids, such that no message can form a control token of its own.

A template writes control tokens as text (`<|im_start|>`), so its output is tokenised with `parse_special`. What a user
wrote must not be: `<|im_end|>` in a message is ordinary text. Since a template may trim, join or quote what it gets,
messages are not looked for in its output but prepared beforehand:

1. A mark, one character that occurs nowhere in the input, is put after every character in the user's strings that could
   start a control token, and at a string's end (beginning) if it ends (begins) with a part of one.
2. If the template prints with marks exactly what it prints without, then every control token without a mark in it is
   the template's own. `Tokenizer.encode` recognises those, then drops the marks: the ids are those of the plain text.
3. Otherwise the template looks into the messages (Qwen3's searches `</think>`). Then only whole control tokens and the
   ends of strings are marked.

Two kinds of template would still be open, neither of them known: one that puts free text between the brackets of a
control token, and, in the third case, one that deletes characters from the midst of a message.

Text without such characters takes the short way: one rendering, no marks. Owns this preparation and the rules about the
shape of messages. Knows no HTTP and no scheduling. A ChatEncoder never changes: any thread may use it.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lamina.coordinator.text.guard import Guard, change_strings, mark_inside, strings_in, unused_character
from lamina.coordinator.text.template import ChatTemplate
from lamina.coordinator.text.tokenizer import Tokenizer
from lamina.spec.errors import InvalidRequest

# A role is part of the prompt's frame (some templates print `<|role|>`), hence not free text.
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")

_TAKEN_NAMES = frozenset(("self", "messages", "tools", "add_generation_prompt", "bos_token", "eos_token"))


@dataclass(frozen=True, slots=True)
class _Input:
    """What a template is given from outside."""

    messages: Sequence[Mapping[str, object]]
    tools: Any
    variables: Mapping[str, object]
    add_generation_prompt: bool

    def strings(self) -> list[str]:
        return strings_in([self.messages, self.tools, [*self.variables.values()]])

    def marked(self, guard: Guard, mark: str, where: re.Pattern[str]) -> "_Input":
        """A copy with marks in every string but the roles; keys, which templates look up, get none at their ends."""

        def change_key(key: str) -> str:
            return mark_inside(key, mark, where)

        def change(text: str) -> str:
            return guard.mark_ends(mark_inside(text, mark, where), mark)

        def copy(value: object) -> Any:
            return change_strings(value, change, change_key)

        return _Input(
            messages=[{**copy(message), "role": message["role"]} for message in self.messages],
            tools=copy(self.tools),
            variables={name: copy(value) for name, value in self.variables.items()},
            add_generation_prompt=self.add_generation_prompt,
        )


class ChatEncoder:
    """Turns conversations into prompt ids for one model."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self.template = template
        self._tokenizer = tokenizer
        self._guard = Guard.against(tokenizer.guarded_texts)

    def encode(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
        variables: Mapping[str, object] | None = None,
    ) -> list[int]:
        """The prompt ids of a conversation, with one bos token where the model wants it.

        messages: mappings with `role` (one of ROLES) and `content` (a string, None, or a list of text parts, which are
        joined by newlines), and whatever else the template reads. variables: further variables of the template.
        Raises InvalidRequest for a malformed message, for what the template refuses, and for too much text.
        """
        variables = variables or {}
        if taken := _TAKEN_NAMES.intersection(variables):
            raise InvalidRequest(f"chat template variables may not be named {', '.join(sorted(taken))}")
        text, mark = self._render(_Input(normalise(messages), tools, variables, add_generation_prompt))
        ids = self._tokenizer.encode(text, add_special=False, parse_special=True, mark=mark)
        bos = self._tokenizer.bos_id
        if self._tokenizer.adds_bos and bos is not None and ids[:1] != [bos]:
            ids.insert(0, bos)
        return ids

    def _render(self, plain: _Input) -> tuple[str, str]:
        """The prompt text and the mark in it, "" if it needs none."""
        text = self._print(plain)
        strings = plain.strings()
        if all(map(self._guard.is_harmless, strings)):
            return text, ""
        mark = unused_character([*strings, self.template.source])
        marked_text = self._print_if_same(plain.marked(self._guard, mark, self._guard.every_start), mark, text)
        if marked_text is None:
            marked_text = self._print(plain.marked(self._guard, mark, self._guard.every_whole))
        return marked_text, mark

    def _print_if_same(self, marked: _Input, mark: str, text: str) -> str | None:
        """What the template prints, or None if it takes marked messages otherwise than the ones that gave `text`."""
        try:
            marked_text = self._print(marked)
        except InvalidRequest:
            return None
        return marked_text if marked_text.replace(mark, "") == text else None

    def _print(self, content: _Input) -> str:
        return self.template.render(
            content.messages,
            add_generation_prompt=content.add_generation_prompt,
            tools=content.tools,
            **content.variables,
        )


def normalise(messages: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    """Copies of `messages` with a string as content. Raises InvalidRequest that names the message by its index."""
    return [_normalise_one(index, message) for index, message in enumerate(messages)]


def _normalise_one(index: int, message: Mapping[str, object]) -> dict[str, object]:
    if not isinstance(message, Mapping):
        raise InvalidRequest(f"messages[{index}] must be an object with role and content")
    if message.get("role") not in ROLES:
        raise InvalidRequest(
            f"messages[{index}].role must be one of {', '.join(ROLES)}, got {message.get('role')!r:.80}"
        )
    content = message.get("content")
    if content is None:
        return {**message, "content": ""}
    if isinstance(content, str):
        return dict(message)
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise InvalidRequest(f"messages[{index}].content must be a string or a list of text parts")
    return {**message, "content": "\n".join(_text_of(index, part) for part in content)}


def _text_of(index: int, part: object) -> str:
    text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
    if not isinstance(text, str):
        raise InvalidRequest(f"messages[{index}].content may hold parts of type text only; this model reads no other")
    return text
