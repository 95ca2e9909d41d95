"""Grammars on the last stage: what may be sampled, when a sequence is complete, what happens after a re-plan."""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterable
from typing import cast

import llguidance
import numpy as np
import pytest

from lamina.coordinator.text.tokenizer import Tokenizer
from lamina.rpc_worker import grammar as grammar_module
from lamina.rpc_worker.grammar import GrammarCompiler
from lamina.rpc_worker.sampler import Sampler
from lamina.spec.errors import InvalidRequest, Unavailable
from lamina.spec.gguf import read_gguf
from lamina.spec.grammars import GrammarCache
from lamina.spec.ids import SeqId
from lamina.spec.sampling import SamplingParams
from lamina.spec.step import AddSequence, FinishReason, SampledToken
from support.models import smollm2_path

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
# Random logits would fill any space between tokens with as many blanks as they may.
GRAMMAR: str = llguidance.LLMatcher.grammar_from_json_schema(SCHEMA, overrides={"whitespace_pattern": "[ ]{1,2}"})


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_metadata(read_gguf(smollm2_path()).metadata, "smollm2")


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(read_gguf(smollm2_path()).metadata, "smollm2", tokenizer.vocab_size)


def generate(
    sampler: Sampler, add: AddSequence, logits_of: Callable[[int], np.ndarray], max_tokens: int = 80
) -> list[SampledToken]:
    sampler.add(add)
    made: list[SampledToken] = []
    start = len(add.history_ids)
    while not made or (made[-1].finish is None and len(made) < max_tokens):
        logits = logits_of(len(made)).astype(np.float32)[None, :]
        made += sampler.sample([(add.seq, start + len(made))], logits)
    return made


def make_add(seq: int, grammar: str, stop_ids: frozenset[int], **changes: object) -> AddSequence:
    values: dict[str, object] = {
        "sampling": SamplingParams(temperature=1.0, seed=seq),
        "history_ids": (5, 6, 7),
        "max_tokens": 200,
    }
    return AddSequence(seq=SeqId(seq), stop_ids=stop_ids, grammar=grammar, **{**values, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(6))
def test_whatever_the_logits_the_output_follows_the_schema(
    seed: int, tokenizer: Tokenizer, compiler: GrammarCompiler
) -> None:
    """B-30: random logits under a schema give a document that the schema accepts, and STOP right at its end."""
    random = np.random.default_rng(seed)
    sampler = Sampler(tokenizer.vocab_size, compiler)
    made = generate(
        sampler,
        make_add(seed, GRAMMAR, tokenizer.eos_ids),
        lambda _: random.normal(0, 3, tokenizer.vocab_size),
    )
    assert made[-1].finish is FinishReason.STOP
    document = json.loads(tokenizer.decode([token.token for token in made]))
    assert set(document) == {"name", "age"}
    assert isinstance(document["name"], str)
    assert 0 <= document["age"] <= 99


def test_greedy_takes_the_best_allowed_token(tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    """Greedy under a grammar is argmax among the allowed tokens, and the sequence stops where nothing may follow."""
    capital, word = (tokenizer.encode(text, add_special=False, parse_special=False)[0] for text in ("Hello", "the"))
    row = np.zeros(tokenizer.vocab_size)
    row[capital], row[word] = 9.0, 5.0
    grammar = llguidance.LLMatcher.grammar_from_regex("[a-z]{3}")
    add = make_add(1, grammar, tokenizer.eos_ids, sampling=SamplingParams())
    made = generate(Sampler(tokenizer.vocab_size, compiler), add, lambda _: row)
    assert [(token.token, token.finish) for token in made] == [(word, FinishReason.STOP)]


def test_after_a_replan_the_grammar_goes_on_where_it_was(tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    """A-41: preempted anywhere, a sequence that comes back with its output as history goes on with the same tokens."""
    rows = np.random.default_rng(3).normal(0, 3, (80, tokenizer.vocab_size))
    sampler = Sampler(tokenizer.vocab_size, compiler)
    whole = [sample.token for sample in generate(sampler, make_add(1, GRAMMAR, tokenizer.eos_ids), lambda i: rows[i])]
    for cut in range(1, len(whole)):
        sampler.clear()
        add = make_add(1, GRAMMAR, tokenizer.eos_ids, history_ids=(5, 6, 7, *whole[:cut]), num_generated=cut)
        made = generate(sampler, add, lambda place, cut=cut: rows[cut + place])  # type: ignore[misc]
        assert [sample.token for sample in made] == whole[cut:]
        assert made[-1].finish is FinishReason.STOP


def test_the_end_token_is_allowed_where_the_text_may_end_and_only_there(
    tokenizer: Tokenizer, compiler: GrammarCompiler
) -> None:
    """A string of at least two letters: eos is refused before, taken after."""
    matcher = compiler.compile(llguidance.LLMatcher.grammar_from_regex("a{2,9}"), [])
    eos, letter = max(tokenizer.eos_ids), tokenizer.encode("a", add_special=False, parse_special=False)[0]
    allowed = []
    for _ in range(3):
        allowed.append(bool(matcher.mask(tokenizer.eos_ids)[eos]))
        assert not matcher.consume(letter)
    assert allowed == [False, False, True]


def test_a_grammar_that_fails_ends_its_own_sequence_only(tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    """A broken grammar is an ERROR with a reason for that sequence; its neighbour in the step goes on."""
    sampler = Sampler(tokenizer.vocab_size, compiler)
    sampler.add(make_add(1, '{"grammars": [{"json_schema": {"type": "nonsense"}}]}', tokenizer.eos_ids))
    sampler.add(make_add(2, "", tokenizer.eos_ids, sampling=SamplingParams()))
    logits = np.zeros((2, tokenizer.vocab_size), np.float32)
    logits[:, 77] = 1.0
    broken, sound = sampler.sample([(SeqId(1), 3), (SeqId(2), 3)], logits)
    assert broken.finish is FinishReason.ERROR
    assert "InvalidRequest" in broken.error
    assert "nonsense" in broken.error
    assert (sound.token, sound.finish) == (77, None)


def test_no_control_token_can_be_part_of_a_document(tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    """Control tokens have no text in a grammar: inside a JSON string none is allowed, not even as characters."""
    matcher = compiler.compile(GRAMMAR, tokenizer.encode('{"name": "A', add_special=False, parse_special=False))
    allowed = matcher.mask(())
    assert allowed.any()
    assert not any(allowed[token] for token in tokenizer.vocabulary.guarded_ids)


def test_a_grammar_is_compiled_while_others_are_sampled(
    tokenizer: Tokenizer, compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compute thread does not wait for a large schema before its sequence's first token is due."""
    may_go_on = threading.Event()
    compile_now = compiler._compile

    def compile_later(grammar: str, generated: list[int]) -> llguidance.LLMatcher:
        assert may_go_on.wait(10)
        return compile_now(grammar, generated)

    monkeypatch.setattr(compiler, "_compile", compile_later)
    sampler = Sampler(tokenizer.vocab_size, compiler)
    sampler.add(make_add(1, GRAMMAR, tokenizer.eos_ids))
    sampler.add(make_add(2, "", tokenizer.eos_ids, sampling=SamplingParams()))
    logits = np.zeros((1, tokenizer.vocab_size), np.float32)
    logits[0, 77] = 1.0
    assert sampler.sample([(SeqId(2), 3)], logits)[0].token == 77
    may_go_on.set()
    (first,) = sampler.sample([(SeqId(1), 3)], logits)
    assert tokenizer.decode([first.token]).lstrip().startswith("{")


def test_a_grammar_that_is_late_ends_its_own_sequence(
    tokenizer: Tokenizer, compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What holds up the steps of others is waited for once, however many sequences wait for it, and not for ever."""
    may_go_on = threading.Event()
    monkeypatch.setattr(compiler, "_compile", lambda *_: may_go_on.wait(60))
    monkeypatch.setattr(grammar_module, "_PATIENCE_S", 0.2)
    sampler = Sampler(tokenizer.vocab_size, compiler)
    start_s = time.monotonic()
    for seq in range(8):
        sampler.add(make_add(seq, GRAMMAR, tokenizer.eos_ids))
    sampler.add(make_add(8, "", tokenizer.eos_ids, sampling=SamplingParams()))
    logits = np.zeros((9, tokenizer.vocab_size), np.float32)
    logits[:, 77] = 1.0
    *late, sound = sampler.sample([(SeqId(seq), 3) for seq in range(9)], logits)
    took_s = time.monotonic() - start_s
    may_go_on.set()
    assert {row.finish for row in late} == {FinishReason.ERROR}
    assert {row.error.split(";")[0] for row in late} == {"Unavailable: the grammar was not compiled within 0.2 s"}
    assert (sound.token, sound.finish) == (77, None)
    assert 0.2 <= took_s < 1.2, "not once for each of eight"


def test_a_grammar_is_compiled_once(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients repeat their schemas: whoever comes later has a matcher of his own at once."""
    compiler = GrammarCompiler(read_gguf(smollm2_path()).metadata, "smollm2", tokenizer.vocab_size)
    made = record_compilations(monkeypatch)
    first = compiler.compile(GRAMMAR, [])
    begun = tokenizer.encode('{"name": "A', add_special=False, parse_special=False)
    second, third = (compiler.compile(GRAMMAR, generated) for generated in (begun, []))
    start = first.mask(())
    assert not first.consume(begun[0])
    assert not np.array_equal(second.mask(()), start)
    assert np.array_equal(third.mask(()), start)
    assert made == [GRAMMAR]


def record_compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    made: list[str] = []
    real = llguidance.LLMatcher

    class Recording:
        grammar_from_regex = real.grammar_from_regex

        def __new__(cls, tokens: llguidance.LLTokenizer, grammar: str, log_level: int) -> llguidance.LLMatcher:  # type: ignore[misc]
            made.append(grammar)
            return real(tokens, grammar, log_level=log_level)

    monkeypatch.setattr(grammar_module.llguidance, "LLMatcher", Recording)
    return made


def test_nobody_in_a_long_queue_has_a_grammar_compiled_twice(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All are prepared when their requests come, and used when those are admitted, long after."""
    compiler = GrammarCompiler(read_gguf(smollm2_path()).metadata, "smollm2", tokenizer.vocab_size)
    made = record_compilations(monkeypatch)
    grammars = [llguidance.LLMatcher.grammar_from_regex(f"a{{{n}}}") for n in range(1, 61)]

    async def scene() -> None:
        for grammar in grammars:
            await compiler.prepare(grammar)

    asyncio.run(scene())
    for grammar in grammars:
        assert compiler.compile(grammar, []).mask(()).any()
    assert made == grammars


def test_compiled_grammars_are_kept_as_far_as_their_sources_have_room() -> None:
    """Those used last; their characters are what bounds the memory."""
    cache: GrammarCache[int] = GrammarCache(10)
    for value, grammar in enumerate(("aaaa", "bbbb", "aaaa", "cc")):
        cache.put(grammar, value)
    assert [cache.get(grammar) for grammar in ("aaaa", "bbbb", "cc")] == [2, 1, 3]
    cache.put("d", 4)
    assert [cache.get(grammar) for grammar in ("aaaa", "bbbb", "cc", "d")] == [2, None, 3, 4]
    cache.put("e" * 11, 5)
    assert "e" * 11 in cache, "the one in use, however large"
    assert not any(grammar in cache for grammar in ("aaaa", "cc", "d"))


def test_a_grammar_that_was_prepared_is_there_at_once(
    tokenizer: Tokenizer, compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its mask too: much of it is built when a text may begin, a twentieth of a second for a large one."""
    properties = {f"property_{i}": {"type": "string", "maxLength": 20} for i in range(400)}
    grammar = llguidance.LLMatcher.grammar_from_json_schema({"properties": properties, "additionalProperties": False})
    asyncio.run(compiler.prepare(grammar))
    made: list[str] = []
    monkeypatch.setattr(grammar_module.llguidance, "LLMatcher", lambda *_, **__: made.append(""))
    matcher = compiler.compile(grammar, [])
    assert matcher.mask(tokenizer.eos_ids).any()
    assert not made


def test_a_sequence_does_not_wait_for_a_grammar_of_a_request_to_come(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own is there; steps of all would wait with it."""
    asyncio.run(compiler.prepare(GRAMMAR))
    real, has_begun, may_go_on = llguidance.LLMatcher, threading.Event(), threading.Event()

    def make(*args: object, **options: object) -> object:
        has_begun.set()
        may_go_on.wait(60)
        return real(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(grammar_module.llguidance, "LLMatcher", make)
    monkeypatch.setattr(grammar_module, "_PATIENCE_S", 5.0)

    async def scene() -> None:
        preparing = asyncio.create_task(compiler.prepare(real.grammar_from_regex("slow")))
        assert await asyncio.to_thread(has_begun.wait, 5)
        try:
            assert compiler.compile(GRAMMAR, []).mask(()).any()
        finally:
            may_go_on.set()
        await preparing

    asyncio.run(scene())


def test_what_is_wrong_with_a_grammar_is_found_when_it_is_prepared(compiler: GrammarCompiler) -> None:
    with pytest.raises(InvalidRequest, match=r"cannot be used: .*nonsense"):
        asyncio.run(compiler.prepare('{"grammars": [{"json_schema": {"type": "nonsense"}}]}'))


def test_a_grammar_that_is_prepared_too_long(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    may_go_on = threading.Event()
    monkeypatch.setattr(compiler, "_compile", lambda *_: may_go_on.wait(60))
    monkeypatch.setattr(grammar_module, "_PATIENCE_S", 0.1)
    with pytest.raises(Unavailable, match=r"not compiled within 0\.1 s"):
        asyncio.run(compiler.prepare(GRAMMAR))
    may_go_on.set()


def test_a_refused_token_is_an_error(compiler: GrammarCompiler) -> None:
    matcher = compiler.compile(GRAMMAR, [])
    with pytest.raises(InvalidRequest, match="grammar failed"):
        matcher.consume(77)


class FailingGrammars:
    """Grammars that break only once a token was chosen: llguidance's parser has limits."""

    def compile(self, grammar: str, generated: Iterable[int]) -> "FailingGrammars":
        return self

    def mask(self, stop_ids: frozenset[int]) -> np.ndarray:
        return np.ones(8, np.bool_)

    def consume(self, token: int) -> bool:
        raise InvalidRequest("the grammar failed: too complex")


def test_a_grammar_that_breaks_after_a_token_ends_its_own_sequence() -> None:
    sampler = Sampler(8, cast(GrammarCompiler, FailingGrammars()))
    sampler.add(make_add(0, GRAMMAR, frozenset(), history_ids=(1,)))
    sampler.add(make_add(1, "", frozenset(), history_ids=(1,)))
    first, second = sampler.sample([(SeqId(0), 1), (SeqId(1), 1)], np.zeros((2, 8), np.float32))
    assert (first.finish, first.error) == (FinishReason.ERROR, "InvalidRequest: the grammar failed: too complex")
    assert second.finish is None
