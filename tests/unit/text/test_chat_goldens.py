"""Chats through SmolLM2's template: the text of an independent formatter and llama.cpp's ids."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from lamina.coordinator.text.chat import ChatEncoder
from lamina.coordinator.text.template import ChatTemplate
from lamina.coordinator.text.tokenizer import Tokenizer

CHATS: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).resolve().parents[2] / "goldens" / "smollm2_logits.json").read_text(encoding="utf-8")
)["chats"]
# llama.cpp takes these for control tokens even in a message; here only the template may write them.
ATTACKS = {name for name, chat in CHATS.items() if any("<|im_" in message["content"] for message in chat["messages"])}


def test_goldens_hold_ordinary_chats_and_attacks() -> None:
    """A golden file without either would let a test below pass."""
    assert len(ATTACKS) >= 2
    assert len(CHATS) - len(ATTACKS) >= 20


@pytest.fixture(scope="module")
def template(smollm2: Tokenizer, smollm2_metadata: Mapping[str, object]) -> ChatTemplate:
    return ChatTemplate.from_metadata(smollm2_metadata, smollm2, "SmolLM2")


@pytest.mark.parametrize("name", CHATS)
def test_text_equals_the_golden(template: ChatTemplate, name: str) -> None:
    """White space, system messages in odd places and closed chats are printed as by the other formatter."""
    chat = CHATS[name]
    assert template.render(chat["messages"], add_generation_prompt=chat["add_generation_prompt"]) == chat["text"]


@pytest.mark.parametrize("name", CHATS)
def test_ids_equal_llama_cpp_but_for_attacks(smollm2: Tokenizer, template: ChatTemplate, name: str) -> None:
    """C-17: equal ids for ordinary messages; of an attack the same text, with fewer control tokens."""
    chat = CHATS[name]
    ids = ChatEncoder(smollm2, template).encode(chat["messages"], add_generation_prompt=chat["add_generation_prompt"])
    if name not in ATTACKS:
        assert ids == chat["ids"]
        return
    assert smollm2.decode(ids) == chat["text"]
    written = sum(message["content"].count("<|im_") for message in chat["messages"])
    assert written > 0
    assert sum(map(smollm2.is_special, ids)) == sum(map(smollm2.is_special, chat["ids"])) - written
