"""Stop strings in streamed text: what may be shown already, and when to stop.

Owns the text that is held back because it may be the start of a stop string. Knows no tokens. One StopMatcher belongs
to one sequence, and to the thread that runs the coordinator's loop.
"""

from collections.abc import Sequence

from lamina.spec.errors import InvalidRequest


class StopMatcher:
    """Finds the stop string that is complete first (of those that end at one place, the longest).

    The result does not depend on how the text was cut into pushes. No part of the stop string found is ever emitted.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if not all(stops):
            raise InvalidRequest("a stop string is empty; leave it out")
        self._stops = tuple(sorted(set(stops), key=len, reverse=True))
        self._held = ""
        self._matched: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """(text that may be shown now, the stop string found or None). After a match nothing more is emitted."""
        if self._matched is not None:
            return "", self._matched
        text = self._held + text
        found = self._first_match(text)
        if found is not None:
            start, self._matched = found
            self._held = ""
            return text[:start], self._matched
        keep = self._num_held(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def flush(self) -> str:
        """The text still held back, at the end of a sequence that no stop string ended."""
        rest, self._held = self._held, ""
        return rest

    def _first_match(self, text: str) -> tuple[int, str] | None:
        starts = ((text.find(stop), stop) for stop in self._stops)
        ends = [(start + len(stop), start, stop) for start, stop in starts if start >= 0]
        if not ends:
            return None
        _, start, stop = min(ends)
        return start, stop

    def _num_held(self, text: str) -> int:
        """Length of the longest end of `text` that is the start of a stop string."""
        longest = min(len(text), len(self._stops[0]) - 1) if self._stops else 0
        for length in range(longest, 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0
