"""/v1/completions over a scripted engine."""

from collections.abc import Iterator

import pytest

from lamina.coordinator.model_file import ModelFile
from support.scripted import Api, events_of, text_script

TEXT = " one two three four five six seven eight nine ten eleven twelve"


@pytest.fixture
def api(model: ModelFile) -> Iterator[Api]:
    with Api(model, text_script(model, TEXT, " other")) as api:
        yield api


def test_a_completion_has_openais_shape(api: Api) -> None:
    answer = api.complete(temperature=0, max_tokens=3).json()
    assert (answer["object"], answer["id"][:5]) == ("text_completion", "cmpl-")
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"], choice["index"]) == (" one two three", "length", 0)
    assert answer["usage"]["completion_tokens"] == 3


def test_sixteen_tokens_by_default(api: Api) -> None:
    assert api.complete(temperature=0, ignore_eos=True).json()["usage"]["completion_tokens"] == 16


def test_a_stream_says_the_same(api: Api) -> None:
    events = events_of(api.complete(temperature=0, max_tokens=50, stream=True, stream_options={"include_usage": True}))
    assert "".join(event["choices"][0]["text"] for event in events[:-1]) == TEXT
    assert events[-2]["choices"][0]["finish_reason"] == "stop"
    assert events[-1]["usage"]["completion_tokens"] == 13


def test_several_prompts_and_choices_are_numbered_prompt_by_prompt(api: Api, model: ModelFile) -> None:
    ids = model.tokenizer.encode("Token ids", add_special=False, parse_special=False)
    answer = api.complete(prompt=["a b", "c d"], n=2, temperature=0, max_tokens=1).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in answer["choices"]] == [" one", " other", " one", " other"]
    assert answer["usage"]["completion_tokens"] == 4
    api.complete(prompt=ids, max_tokens=1)
    assert list(api.last_prompt) == ids
    api.complete(prompt=[ids, ids[:1]], max_tokens=1)
    assert list(api.last_prompt) == ids[:1]


def test_echo(api: Api) -> None:
    assert api.complete(prompt="Count:", echo=True, temperature=0, max_tokens=2).json()["choices"][0]["text"] == (
        "Count: one two"
    )
    events = events_of(api.complete(prompt="Count:", echo=True, temperature=0, max_tokens=2, stream=True))
    assert "".join(event["choices"][0]["text"] for event in events) == "Count: one two"


def test_logprobs_with_offsets(api: Api) -> None:
    logprobs = api.complete(temperature=0, max_tokens=3, logprobs=1).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == [" one", " two", " three"]
    assert logprobs["text_offset"] == [0, 4, 8]
    assert [list(top) for top in logprobs["top_logprobs"]] == [[" one"], [" two"], [" three"]]
    assert all(-1e-3 < value <= 0 for value in logprobs["token_logprobs"])
    events = events_of(api.complete(temperature=0, max_tokens=3, logprobs=1, stream=True))
    offsets = [event["choices"][0]["logprobs"]["text_offset"] for event in events if event["choices"][0]["logprobs"]]
    assert offsets == [[0], [4], [8]]


def test_a_raw_prompt_may_hold_control_tokens(api: Api, model: ModelFile) -> None:
    api.complete(prompt="<|im_start|>user\nHi<|im_end|>", max_tokens=1)
    assert api.last_prompt[0] == model.tokenizer.vocabulary.texts.index("<|im_start|>")
