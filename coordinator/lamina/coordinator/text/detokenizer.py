"""Text from tokens as they arrive, never half a character.

Owns the bytes that are held back. Knows neither stop strings nor channels. One Detokenizer belongs to one sequence, and
to the thread that runs the coordinator's loop.
"""

import codecs
from collections.abc import Iterable

from lamina.coordinator.text.tokenizer import Tokenizer


class Detokenizer:
    """Pushed tokens in, text out; all pushes and the flush together equal `Tokenizer.decode` of all ids.

    Bytes that may still become a character wait for the next push; bytes that no longer can become U+FFFD, one for each
    maximal invalid part, as `bytes.decode(errors="replace")` counts them.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        """The text that `ids` complete, possibly "". Raises InvalidRequest for an id outside of the vocabulary."""
        shown = (token for token in ids if not (self._skip_special and self._tokenizer.is_special(token)))
        return self._decoder.decode(b"".join(map(self._tokenizer.token_bytes, shown)))

    def flush(self) -> str:
        """What is still held back, as U+FFFD; afterwards the detokenizer is as new."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest
