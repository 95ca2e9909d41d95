"""Thoughts told apart from the answer: however the text is cut, in whole answers and in streams."""

import random
from dataclasses import replace
from typing import Any

import pytest

from lamina.coordinator.api.reasoning import ThoughtSplitter, is_opened_by
from lamina.coordinator.model_file import ModelFile
from lamina.coordinator.text.chat import ChatEncoder
from lamina.coordinator.text.template import ChatTemplate
from support.scripted import Api, events_of, text_script

# Like Qwen3's: the model opens its thoughts itself, or is told in the prompt that there are none.
SOURCE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content.split('</think>')[-1] }}\n{% endfor %}assistant: "
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
)
OPENING_SOURCE = SOURCE + "<think>\n"  # like DeepSeek-R1's


def thinking(model: ModelFile, source: str = SOURCE) -> ModelFile:
    """The model with a template of a thinking family."""
    return replace(model, chat=ChatEncoder(model.tokenizer, ChatTemplate(source, "", "")))


@pytest.mark.parametrize(
    ("text", "opened", "thought", "answer"),
    [
        ("<think>\nHm, well.\n</think>\n\nYes.", False, "Hm, well.", "Yes."),
        ("\n <think>Hm</think>Yes <think>no</think>", False, "Hm", "Yes <think>no</think>"),
        ("Hm.\n</think>\n\nYes.\n", True, "Hm.", "Yes.\n"),
        ("<think>\n\n</think>\n\n  Yes", False, "", "Yes"),
        (" Yes <think>", False, "", " Yes <think>"),
        ("<thin", False, "", "<thin"),
        ("<think>a </thin b < </think >", False, "a </thin b < </think >", ""),
        ("<think>never closed \n", False, "never closed", ""),
        ("", True, "", ""),
        ("   ", False, "", "   "),
    ],
)
def test_splitting_does_not_depend_on_the_cuts(text: str, opened: bool, thought: str, answer: str) -> None:
    cuts = random.Random(text)
    for _ in range(50):
        splitter = ThoughtSplitter(opened=opened)
        rest, found = text, ["", ""]
        while rest:
            length = cuts.randint(1, 4)
            for i, part in enumerate(splitter.push(rest[:length])):
                found[i] += part
            rest = rest[length:]
        for i, part in enumerate(splitter.finish()):
            found[i] += part
        assert found == [thought, answer]


def test_where_thoughts_are_open() -> None:
    assert is_opened_by("assistant: <think>\n")
    assert not is_opened_by("<think>\n\n</think>\n\n")


def test_a_whole_answer_and_a_stream(model: ModelFile) -> None:
    with Api(thinking(model), text_script(model, "<think>\nHm, well.\n</think>\n\nYes.")) as api:
        message = api.chat(temperature=0).json()["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("Hm, well.", "Yes.")
        deltas: list[dict[str, Any]] = [
            event["choices"][0]["delta"] for event in events_of(api.chat(temperature=0, stream=True))
        ]
        assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Hm, well."
        assert "".join(delta.get("content", "") for delta in deltas) == "Yes."
        whole = api.complete(prompt="<think>", temperature=0).json()["choices"][0]["text"]
        assert "</think>" in whole  # a text completion is as the model wrote it


def test_thoughts_that_the_prompt_opens(model: ModelFile) -> None:
    with Api(thinking(model, OPENING_SOURCE), text_script(model, "Hm.\n</think>\n\nYes.")) as api:
        message = api.chat(temperature=0).json()["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("Hm.", "Yes.")


def test_a_model_without_thoughts_is_left_alone(model: ModelFile) -> None:
    with Api(model, text_script(model, "<think>a</think>b")) as api:
        message = api.chat(temperature=0).json()["choices"][0]["message"]
        assert message["content"] == "<think>a</think>b"
        assert "reasoning_content" not in message


def test_effort_is_put_into_the_templates_own_words(model: ModelFile) -> None:
    with Api(thinking(model), text_script(model, "Yes.")) as api:
        for effort, opens in (("none", True), ("low", False)):
            api.chat(reasoning_effort=effort, temperature=0)
            assert ("<think>" in model.tokenizer.decode(api.last_prompt)) is opens
    with Api(thinking(model, "{{ reasoning_effort }}"), text_script(model, "Yes.")) as api:
        api.chat(reasoning_effort="high", temperature=0)
        assert model.tokenizer.decode(api.last_prompt) == "high"
