"""Thoughts before an answer: text between <think> and </think>, told apart as it streams. Knows no HTTP.

Such models (Qwen3, QwQ, DeepSeek-R1 and what was distilled from them) open their thoughts at the very start, or their
template has done so at the end of the prompt. A later <think> is text.
"""

_OPENING = "<think>"
_CLOSING = "</think>"


def thinks(template: str) -> bool:
    """Whether a chat template is that of a model which writes thoughts."""
    return _CLOSING in template


def is_opened_by(prompt_end: str) -> bool:
    """Whether a prompt leaves the model in the midst of its thoughts; its last characters are enough."""
    return prompt_end.rstrip().endswith(_OPENING)


class ThoughtSplitter:
    """One belongs to one choice. Space around the tags is neither thought nor answer."""

    def __init__(self, *, opened: bool) -> None:
        self._held = ""
        self._is_open: bool | None = True if opened else None  # None: nothing but space and part of a tag so far
        self._is_start = True  # of the part that is being read: space is dropped

    def push(self, text: str) -> tuple[str, str]:
        """(thought, answer) that may be shown now."""
        if self._is_open is False and not self._is_start:
            return "", text
        self._held += text
        thought = ""
        if self._is_open is None:
            self._look_for_opening()
        if self._is_open:
            thought = self._take_thought()
        return thought, self._take_answer() if self._is_open is False else ""

    def finish(self) -> tuple[str, str]:
        """What is still held back, at the end of the text: thoughts that were never closed are thoughts."""
        rest, self._held = self._held, ""
        return (rest.rstrip(), "") if self._is_open else ("", rest)

    def _look_for_opening(self) -> None:
        start = self._held.lstrip()
        if start.startswith(_OPENING):
            self._is_open, self._held = True, start.removeprefix(_OPENING)
        elif not _OPENING.startswith(start):
            self._is_open, self._is_start = False, False  # an answer without thoughts keeps its space

    def _take_thought(self) -> str:
        before, closing, after = self._held.partition(_CLOSING)
        if self._is_start:
            before = before.lstrip()
            self._is_start = not before
        if closing:
            self._is_open, self._is_start, self._held = False, True, after
            return before.rstrip()
        shown = before[: len(before) - _num_held(before)]
        self._held = before[len(shown) :]
        return shown

    def _take_answer(self) -> str:
        text, self._held = self._held, ""
        if self._is_start:
            text = text.lstrip()
            self._is_start = not text
        return text


def _num_held(text: str) -> int:
    """Length of the end that may be space before the closing tag and the start of that tag."""
    for length in range(min(len(text), len(_CLOSING) - 1), 0, -1):
        if _CLOSING.startswith(text[-length:]):
            return len(text) - len(text[:-length].rstrip())
    return len(text) - len(text.rstrip())
