"""How many compiled grammars the last stage keeps, which the coordinator relies on. Plain values.

A grammar is compiled when its request comes and used when its sequence is admitted, perhaps minutes later. So the
stage keeps those used last, as far as KEPT_CHARACTERS go; the coordinator lets open requests have half of it, and takes
a grammar for known while less than the other half was used after it.
"""

from collections import OrderedDict
from typing import Generic, TypeVar

# Of one grammar's source. OpenAI takes 120,000 of names and values; the last stage compiles some seconds per MiB.
MAX_CHARACTERS = 2**18
KEPT_CHARACTERS = 16 * MAX_CHARACTERS  # compiled, one takes some 60 to 80 bytes: 300 MiB at most, mostly far less

Value = TypeVar("Value")


class GrammarCache(Generic[Value]):
    """A value for each of the grammars used last, whose sources have `max_characters` together. For one thread."""

    def __init__(self, max_characters: int) -> None:
        self._max_characters = max_characters
        self._values: OrderedDict[str, Value] = OrderedDict()  # the one used last comes last
        self._num_characters = 0

    def __contains__(self, grammar: str) -> bool:
        return grammar in self._values

    def get(self, grammar: str) -> Value | None:
        """What is kept for it. That alone is no use."""
        return self._values.get(grammar)

    def put(self, grammar: str, value: Value) -> None:
        """Keep a value for a grammar that is used now; those that were used longest ago go."""
        if grammar not in self._values:
            self._num_characters += len(grammar)
        self._values[grammar] = value
        self._values.move_to_end(grammar)
        while self._num_characters > self._max_characters and len(self._values) > 1:
            oldest, _ = self._values.popitem(last=False)
            self._num_characters -= len(oldest)
