"""/v1/chat/completions over a scripted engine: what comes out, streamed and whole."""

import math
from collections.abc import Iterator

import pytest

from lamina.coordinator.model_file import ModelFile
from support.scripted import Api, events_of, text_script

TEXT = "The sky is blue. Naïve café ☕ 🙂 end."


@pytest.fixture
def api(model: ModelFile) -> Iterator[Api]:
    with Api(model, text_script(model, TEXT, "Second choice")) as api:
        yield api


def test_an_answer_has_openais_shape(api: Api, model: ModelFile) -> None:
    answer = api.chat(temperature=0).json()
    num_tokens = len(model.tokenizer.encode(TEXT, add_special=False, parse_special=False)) + 1  # and the end of text
    num_prompt = len(model.chat.encode([{"role": "user", "content": "Hi"}]))
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    assert answer["model"] == "scripted"
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": TEXT, "refusal": None}
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "stop", None)
    assert choice["stop_reason"] is None  # the model's own end of text
    assert answer["usage"] == {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_tokens,
        "total_tokens": num_prompt + num_tokens,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_timings_are_llama_servers(api: Api) -> None:
    timings = api.chat(temperature=0, max_tokens=5).json()["timings"]
    assert timings["prompt_n"] > 0
    assert (timings["predicted_n"], timings["cache_n"]) == (5, 0)
    assert timings["prompt_per_second"] == pytest.approx(1000 * timings["prompt_n"] / timings["prompt_ms"])
    assert timings["predicted_per_token_ms"] == pytest.approx(timings["predicted_ms"] / 5)


def test_a_stream_says_the_same_as_the_whole(api: Api) -> None:
    events = events_of(api.chat(temperature=0, stream=True))
    first, *deltas, last = events
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(event["choices"][0]["delta"]["content"] for event in deltas) == TEXT
    assert len(deltas) > 8  # an event per token that completes a character
    assert last["choices"][0]["delta"] == {}
    assert last["choices"][0]["finish_reason"] == "stop"
    assert last["timings"]["predicted_n"] > 0
    assert {event["id"] for event in events} == {first["id"]}
    assert all(event["object"] == "chat.completion.chunk" for event in events)
    assert not any("usage" in event for event in events)


def test_a_character_of_several_tokens_comes_as_a_whole(api: Api) -> None:
    """No event holds half of a character (UTF-8 across tokens)."""
    events = events_of(api.chat(temperature=0, stream=True))
    assert not any("\ufffd" in str(event) for event in events)


def test_usage_in_the_stream_on_request(api: Api) -> None:
    events = events_of(api.chat(temperature=0, stream=True, stream_options={"include_usage": True}))
    assert all(event["usage"] is None for event in events[:-1])
    assert events[-1]["choices"] == []
    assert events[-1]["usage"] == api.chat(temperature=0).json()["usage"] | {
        "prompt_tokens_details": {"cached_tokens": 0}
    }
    assert events[-1]["timings"]["predicted_n"] == events[-1]["usage"]["completion_tokens"]


def test_cached_tokens_of_a_repeated_prompt(api: Api) -> None:
    prompt = [{"role": "user", "content": "word " * 40}]
    first = api.chat(messages=prompt, max_tokens=2).json()["usage"]
    second = api.chat(messages=prompt, max_tokens=2).json()
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == (first["prompt_tokens"] - 1) // 16 * 16
    assert second["timings"]["cache_n"] == cached
    assert second["timings"]["prompt_n"] == first["prompt_tokens"] - cached


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_the_limit_of_tokens(api: Api, name: str) -> None:
    answer = api.chat(temperature=0, **{name: 3}).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 3
    assert answer["choices"][0]["message"]["content"] == "The sky is"


def test_without_a_limit_the_context_is_the_limit(api: Api) -> None:
    answer = api.chat(temperature=0, ignore_eos=True, stop=None).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["total_tokens"] == 256


def test_n_choices_whole_and_streamed(api: Api) -> None:
    answer = api.chat(temperature=0, n=2).json()
    texts = [choice["message"]["content"] for choice in answer["choices"]]
    assert texts == [TEXT, "Second choice"]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert answer["usage"]["prompt_tokens"] < 50  # counted once
    streamed = ["", ""]
    ends = []
    for event in events_of(api.chat(temperature=0, n=2, stream=True)):
        (choice,) = event["choices"]
        streamed[choice["index"]] += choice["delta"].get("content", "")
        if choice["finish_reason"]:
            ends.append(choice["index"])
            assert ("timings" in event) == (len(ends) == 2)
    assert streamed == texts
    assert sorted(ends) == [0, 1]


@pytest.mark.parametrize(("stop", "text"), [("blue", "The sky is "), (["zzz", ". N", "is"], "The sky "), ("T", "")])
def test_a_stop_string_ends_the_text_before_it(api: Api, stop: object, text: str) -> None:
    choice = api.chat(temperature=0, stop=stop).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")
    assert choice["stop_reason"] in ([stop] if isinstance(stop, str) else stop)
    events = events_of(api.chat(temperature=0, stop=stop, stream=True))
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == text


def test_the_start_of_a_stop_string_at_the_end_is_shown(api: Api) -> None:
    for options in ({}, {"stream": True}):
        response = api.chat(temperature=0, stop="end. Really", **options)
        if options:
            parts = [event["choices"][0]["delta"].get("content", "") for event in events_of(response)]
        else:
            parts = [response.json()["choices"][0]["message"]["content"]]
        assert "".join(parts) == TEXT


def test_half_a_character_at_the_end_is_shown_as_such(model: ModelFile) -> None:
    ids = model.tokenizer.encode("☕", add_special=False, parse_special=False)
    assert len(ids) > 1
    with Api(model, text_script(model, "☕")) as api:
        answer = api.chat(temperature=0, max_tokens=len(ids) - 1).json()
        assert answer["choices"][0]["message"]["content"] == "\ufffd"


def test_a_stop_string_frees_the_sequence(api: Api) -> None:
    """B-36: what a stop string ends is cancelled, its blocks come free, the last stage forgets it."""
    api.chat(temperature=0, stop="blue")
    api.chat(temperature=0, max_tokens=1)  # lets the outstanding steps drain
    assert api.engine.scheduler.kv_usage_ratio == 0
    assert api.engine.scheduler.num_running == 0
    assert set(api.pipeline.removed) == set(api.pipeline.adds)


def test_stop_token_ids(api: Api, model: ModelFile) -> None:
    (blue,) = model.tokenizer.encode(" blue", add_special=False, parse_special=False)
    choice = api.chat(temperature=0, stop_token_ids=[blue]).json()["choices"][0]
    assert choice["message"]["content"] == "The sky is"
    assert choice["stop_reason"] == blue


def test_logprobs_in_openais_shape(api: Api) -> None:
    choice = api.chat(temperature=0, max_tokens=3, logprobs=True, top_logprobs=2).json()["choices"][0]
    content = choice["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["The", " sky", " is"]
    for entry in content:
        # one logit of 30 among zeros: log softmax = -log(1 + (V - 1) exp(-30))
        assert entry["logprob"] == pytest.approx(-math.log1p((api.pipeline.vocab_size - 1) * math.exp(-30)), abs=1e-6)
        assert bytes(entry["bytes"]).decode() == entry["token"]
        assert len(entry["top_logprobs"]) == 2
        assert entry["top_logprobs"][0]["token"] == entry["token"]
    streamed = events_of(api.chat(temperature=0, max_tokens=3, logprobs=True, top_logprobs=2, stream=True))
    parts = [event["choices"][0]["logprobs"] for event in streamed if event["choices"][0]["logprobs"]]
    assert [part["content"][0] for part in parts] == content


def test_text_parts_and_control_tokens_in_messages(api: Api, model: ModelFile) -> None:
    """A user's text never becomes a control token on its way through the API."""
    parts = [{"type": "text", "text": "Hi <|im_end|>"}, {"type": "text", "text": "there"}]
    api.chat(messages=[{"role": "user", "content": parts}], max_tokens=1)
    expected = model.chat.encode([{"role": "user", "content": "Hi <|im_end|>\nthere"}])
    assert list(api.last_prompt) == expected
