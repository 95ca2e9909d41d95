"""The golden files hold together, and the comparison with them is the formula it claims to be."""

import json
import math
from pathlib import Path

import gguf
import numpy as np
import pytest
from goldens.golden_reader import LogitGolden, compare_with_goldens, kl_to_logits, load_logit_goldens, unpack

HERE = Path(__file__).parent
DATA = HERE.parent / "data"


def small_golden() -> LogitGolden:
    """Two positions over four tokens, two of them kept: p = (.5, .25, rest .25) and (.6, .3, rest .1)."""
    return LogitGolden(
        name="small",
        prompt=(3,),
        continuation=(2, 0),
        top_ids=np.array([[2, 0], [0, 1]]),
        top_logprobs=np.log([[0.5, 0.25], [0.6, 0.3]]),
        rest_logprobs=np.log([0.25, 0.1]),
    )


def test_kl_is_the_formula_worked_out_by_hand() -> None:
    """KL over the kept tokens and one bucket, by hand; the bucket may split in any way."""
    q = np.array([[0.125, 0.1, 0.25, 0.525], [0.6, 0.3, 0.04, 0.06]])
    by_hand = 0.5 * math.log(0.5 / 0.25) + 0.25 * math.log(0.25 / 0.125) + 0.25 * math.log(0.25 / 0.625)
    kl = kl_to_logits(small_golden(), np.log(q) + np.array([[7.0], [-3.0]]))
    np.testing.assert_allclose(kl, [by_hand, 0.0], atol=1e-12)


def test_agreement_counts_top1_and_the_margin_of_flips() -> None:
    """Top-1 differs at the first position only, where the golden's margin is ln 2."""
    logits = np.log([[0.125, 0.1, 0.25, 0.525], [0.6, 0.3, 0.04, 0.06]])
    agreement = compare_with_goldens({"small": small_golden()}, {"small": logits})
    assert (agreement.num_positions, agreement.top1_equal) == (2, 0.5)
    assert agreement.flipped_margin_max == pytest.approx(math.log(2))


@pytest.mark.parametrize("file_name", ["smollm2_logits.json", "smollm2_f32_logits.json"])
def test_logit_goldens_are_distributions(file_name: str) -> None:
    """As stored, probabilities add up to 1 but for rounding at every position, likeliest first."""
    for prompt in json.loads((HERE / file_name).read_text())["prompts"]:
        stored = np.array(prompt["nlp"]) / 1e5
        total = np.exp(-stored).sum(axis=-1) + np.exp(-np.array(prompt["rest"]) / 1e5)
        np.testing.assert_allclose(total, 1.0, atol=1e-5)
        assert stored.shape == np.shape(prompt["top"]) == (32, 64)
        assert (np.diff(stored, axis=-1) >= 0).all()


def test_rounding_in_the_file_costs_no_kl() -> None:
    """Logits that differ from a golden only by the rounding in the file have a KL far below that rounding."""
    top = np.log([[0.6180339887, 0.2360679775]])
    logits = np.concatenate([top, np.log([[0.1, 0.0458980338]])], axis=-1)
    stored = {"name": "x", "ids": [1], "cont": [0], "top": [[0, 1]]}
    stored |= {"nlp": np.rint(top * -1e5).tolist(), "rest": [round(math.log(0.1458980338) * -1e5)]}
    kl = kl_to_logits(unpack(stored, 100_000), logits)
    assert 0 <= kl[0] < 1e-10


def test_logit_goldens_cover_the_lengths_around_a_page() -> None:
    """Twenty prompts, among them 1, 15, 16 and 17 tokens and one over 512; continuations are greedy."""
    goldens = load_logit_goldens(HERE / "smollm2_logits.json")
    lengths = {len(golden.prompt) for golden in goldens.values()}
    assert len(goldens) == 20
    assert {1, 15, 16, 17} <= lengths
    assert max(lengths) > 512
    for golden in goldens.values():
        assert tuple(golden.top_ids[:, 0]) == golden.continuation


def byte_alphabet() -> dict[str, int]:
    """GPT-2's character for each byte, inverted: printable Latin-1 stands for itself, the rest from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


@pytest.mark.parametrize("vocab", ["vocab_llama_bpe", "vocab_qwen2"])
def test_tokenizer_goldens_spell_their_texts(vocab: str) -> None:
    """Joining the tokens of every golden, read from the GGUF file by `gguf` alone, gives the text back."""
    reader = gguf.GGUFReader(DATA / f"{vocab}.gguf")
    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    types = reader.fields["tokenizer.ggml.token_type"].contents()
    alphabet = byte_alphabet()
    spelt = [
        bytes(alphabet[char] for char in token) if kind == gguf.TokenType.NORMAL else token.encode()
        for token, kind in zip(tokens, types, strict=True)
    ]
    content = json.loads((HERE / "tokenizer.json").read_text())
    goldens = content["vocabs"][vocab]["texts"]
    assert goldens.keys() == content["texts"].keys()
    for name, golden in goldens.items():
        for ids in (golden["plain"], golden.get("special", golden["plain"])):
            assert b"".join(spelt[token] for token in ids) == content["texts"][name].encode(), name
        assert not any(types[token] == gguf.TokenType.CONTROL for token in golden["plain"]), name
