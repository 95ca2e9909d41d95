"""Constrained sampling on the last stage: which tokens a grammar allows next, and whether it is complete.

Owns the llguidance tokenizer of one model, built from the token bytes in the worker's own file, and one matcher per
sequence. Matchers belong to the compute thread, beside the sampler; they are made on another, before their sequence
comes (`prepare`). Only after a re-plan it may come first: then the steps of others wait for what takes longer than its
prompt, once for all who use it and for `_PATIENCE_S` at most, when its own sequence ends.

Knows nothing of JSON or tools: a grammar is a string in llguidance's own format, checked by the coordinator, and
bounded in size, before it comes here.
"""

import asyncio
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock

import llguidance
import numpy as np
from numpy.typing import NDArray

from lamina.spec.errors import InvalidRequest, Unavailable
from lamina.spec.grammars import KEPT_CHARACTERS, GrammarCache
from lamina.spec.vocabulary import Vocabulary, read_vocabulary

BoolMask = NDArray[np.bool_]
_PATIENCE_S = 10.0  # from a sequence's arrival until its grammar must be there; the largest take a second or two


class _TokenTable:
    """What llguidance wants of a tokenizer.

    Where a grammar forces a text it asks how to spell it, and allows only that: by the longest tokens from the left,
    which is nearly always the model's own spelling and needs no merge rules here.
    """

    def __init__(self, vocabulary: Vocabulary, vocab_size: int) -> None:
        self.tokens = list(vocabulary.token_bytes())
        self.tokens += [b""] * (vocab_size - len(self.tokens))  # padding rows of the output matrix are no tokens
        self.special_token_ids = vocabulary.guarded_ids
        self.bos_token_id = vocabulary.bos_id
        self.end_ids = sorted(vocabulary.eos_ids) or [vocabulary.eos_id or 0]
        self.eos_token_id = self.end_ids[0]
        self._ids: dict[bytes, int] = {}
        for token, data in enumerate(self.tokens):
            self._ids.setdefault(data, token)
        for token in self.special_token_ids:
            self._ids.pop(self.tokens[token], None)
        self._longest = max(map(len, self._ids))

    def __call__(self, text: bytes | str) -> list[int]:
        data = text.encode() if isinstance(text, str) else text
        spelling: list[int] = []
        start = 0
        while start < len(data):
            stops = range(min(len(data), start + self._longest), start, -1)
            stop = next((stop for stop in stops if data[start:stop] in self._ids), None)
            if stop is None:  # a byte that no token has
                return spelling
            spelling.append(self._ids[data[start:stop]])
            start = stop
        return spelling


class GrammarCompiler:
    """Makes matchers for one model, on two threads: grammars of requests to come on one, of sequences on the other.

    So a sequence whose grammar is there does not wait for the next one's. The tokenizer's trie is begun at once (0.2 s
    for 49k tokens, with the interpreter held), so that it is there when the weights are.
    """

    def __init__(self, metadata: Mapping[str, object], where: str, vocab_size: int) -> None:
        """`metadata` is the GGUF file's, `where` names it in messages, `vocab_size` is the width of the logits."""
        self._vocab_size = vocab_size
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._preparing = ThreadPoolExecutor(1, thread_name_prefix="prepare")
        self._tokenizer = self._pool.submit(_build_tokenizer, metadata, where, vocab_size)
        self._fresh: GrammarCache[llguidance.LLMatcher] = GrammarCache(KEPT_CHARACTERS)  # before any token
        self._lock = Lock()  # of that

    async def prepare(self, grammar: str) -> None:
        """Compile a grammar, for `compile` to find it ready. Raises what the first use of its matcher would."""
        try:
            async with asyncio.timeout(_PATIENCE_S):
                await asyncio.wrap_future(self._preparing.submit(self._try, grammar))
        except TimeoutError:
            raise _late() from None

    def compile(self, grammar: str, generated: Iterable[int]) -> "GrammarMatcher":
        """A matcher that has consumed `generated` (after a re-plan), in the making.

        Its first use raises InvalidRequest with llguidance's reason, InvalidCheckpoint if the file has no vocabulary,
        Unavailable if it has waited too long.
        """
        return GrammarMatcher(self._pool.submit(self._compile, grammar, list(generated)), self._vocab_size)

    def _compile(self, grammar: str, generated: list[int]) -> llguidance.LLMatcher:
        with self._lock:
            known = self._fresh.get(grammar)
        fresh = known or llguidance.LLMatcher(self._tokenizer.result(), grammar, log_level=0)
        matcher = fresh
        if not fresh.is_error():
            with self._lock:
                self._fresh.put(grammar, fresh)
            matcher = fresh.deep_copy()
            matcher.consume_tokens(generated)
        if matcher.is_error():
            raise InvalidRequest(f"the grammar cannot be used: {_first_line(matcher.get_error())}")
        return matcher

    def _try(self, grammar: str) -> None:
        """Compile it, and see where a text may begin: much of a grammar is built only then, for all its matchers."""
        matcher = self._compile(grammar, [])
        matcher.compute_bitmask()
        if matcher.is_error():
            raise _failed(matcher)


def _build_tokenizer(metadata: Mapping[str, object], where: str, vocab_size: int) -> llguidance.LLTokenizer:
    table = _TokenTable(read_vocabulary(metadata, where), vocab_size)
    return llguidance.LLTokenizer(
        llguidance.TokenizerWrapper(table),
        n_vocab=vocab_size,
        eos_token=table.end_ids,
        slices=llguidance.LLTokenizer.json_slices(),
    )


class GrammarMatcher:
    """Where one sequence stands in its grammar. Its first use waits until the grammar is compiled, but not for ever."""

    def __init__(self, matcher: "Future[llguidance.LLMatcher]", vocab_size: int) -> None:
        self._coming = matcher
        self._due_s = time.monotonic() + _PATIENCE_S
        self._vocab_size = vocab_size
        self._bits = np.zeros(-(-vocab_size // 32), np.uint32)

    @property
    def _matcher(self) -> llguidance.LLMatcher:
        try:
            return self._coming.result(max(0.0, self._due_s - time.monotonic()))
        except TimeoutError:
            self._coming.cancel()
            raise _late() from None

    def mask(self, stop_ids: Iterable[int]) -> BoolMask:
        """Allowed tokens, bool [vocab]; `stop_ids` are allowed where the text may end.

        Raises InvalidRequest if the grammar failed or allows nothing, and see `GrammarCompiler.compile`.
        """
        matcher = self._matcher
        matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        if matcher.is_error():
            raise _failed(matcher)
        allowed = np.unpackbits(self._bits.view(np.uint8), bitorder="little")[: self._vocab_size].astype(np.bool_)
        if matcher.is_accepting():
            allowed[[token for token in stop_ids if token < self._vocab_size]] = True
        if not allowed.any():
            raise InvalidRequest("the grammar failed: it allows no token of this model's vocabulary")
        return allowed

    def consume(self, token: int) -> bool:
        """Go on by a token that the mask allowed; whether the text is complete now, so that nothing may follow.

        Raises InvalidRequest if the grammar refuses the token.
        """
        matcher = self._matcher
        if not matcher.consume_token(token):
            raise _failed(matcher)
        return bool(matcher.is_stopped())


def _failed(matcher: llguidance.LLMatcher) -> InvalidRequest:
    return InvalidRequest(f"the grammar failed: {_first_line(matcher.get_error())}")


def _late() -> Unavailable:
    return Unavailable(
        f"the grammar was not compiled within {_PATIENCE_S:g} s; use a smaller one, or try again when fewer are"
    )


def _first_line(reason: str) -> str:
    """llguidance adds its state on further lines, for its developers."""
    return reason.strip().split("\n", 1)[0][:300]
