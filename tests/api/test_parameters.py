"""Every parameter arrives at the last stage as it was meant; what is wrong or unknown is a 400 that names it."""

from collections.abc import Iterator

import pytest

from lamina.coordinator.model_file import ModelFile
from lamina.spec.sampling import SamplingParams
from support.scripted import Api, text_script


@pytest.fixture(scope="module")
def api(model: ModelFile) -> Iterator[Api]:
    with Api(model, text_script(model, "ok then")) as api:
        yield api


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 0.5),
        ("temperature", 0),
        ("top_p", 0.25),
        ("top_k", 7),
        ("min_p", 0.125),
        ("typical_p", 0.75),
        ("top_n_sigma", 1.5),
        ("repetition_penalty", 1.25),
        ("presence_penalty", -0.5),
        ("frequency_penalty", 0.5),
        ("penalty_window", 64),
        ("seed", 12345),
    ],
)
@pytest.mark.parametrize("route", ["chat", "complete"])
def test_a_sampling_parameter_reaches_the_last_stage(api: Api, route: str, name: str, value: float) -> None:
    """B-30: each parameter arrives, all others stay neutral."""
    response = getattr(api, route)(max_tokens=1, **({"seed": 1} | {name: value}))
    assert response.status_code == 200, response.text
    expected = {"temperature": 1.0, "seed": 1, name: value}
    assert api.last_add.sampling == SamplingParams(**expected)


def test_logit_bias_arrives_with_ids_as_numbers(api: Api) -> None:
    api.chat(max_tokens=1, logit_bias={"17": -100, "3": 2.5})
    assert api.last_add.sampling.logit_bias == {17: -100, 3: 2.5}


def test_a_seed_is_drawn_where_none_is_given(api: Api) -> None:
    seeds = set()
    for _ in range(3):
        api.chat(max_tokens=1)
        seeds.add(api.last_add.sampling.seed)
    assert len(seeds) == 3
    api.chat(max_tokens=1, seed=-1)
    assert api.last_add.sampling.seed == 2**64 - 1


def test_choices_of_one_request_differ_in_their_number_only(api: Api) -> None:
    api.chat(max_tokens=1, n=3, seed=5, temperature=1)
    adds = list(api.pipeline.adds.values())[-3:]
    assert [add.choice for add in adds] == [0, 1, 2]
    assert {add.sampling.seed for add in adds} == {5}


def test_ends_of_text_stop_unless_told_otherwise(api: Api, model: ModelFile) -> None:
    api.chat(max_tokens=1)
    assert api.last_add.stop_ids == model.tokenizer.eos_ids
    api.chat(max_tokens=1, stop_token_ids=[9])
    assert api.last_add.stop_ids == model.tokenizer.eos_ids | {9}
    api.chat(max_tokens=1, ignore_eos=True)
    assert api.last_add.stop_ids == frozenset()


def test_logprobs_ask_for_the_right_number(api: Api) -> None:
    for body, expected in (
        ({}, -1),
        ({"logprobs": False}, -1),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 5}, 5),
    ):
        api.chat(max_tokens=1, **body)
        assert api.last_add.sampling.num_logprobs == expected
    api.complete(max_tokens=1, logprobs=4)
    assert api.last_add.sampling.num_logprobs == 4


@pytest.mark.parametrize(
    "body",
    [
        {"user": "me"},
        {"metadata": {"a": "b"}},
        {"store": False},
        {"service_tier": "auto"},
        {"modalities": ["text"]},
        {"reasoning_effort": None},
        {"functions": None},
        {"model": "scripted"},
        {"stop": None, "n": 1, "stream": False, "temperature": None, "response_format": {"type": "text"}},
        {"tools": [], "tool_choice": "auto"},
    ],
)
def test_what_changes_nothing_is_taken(api: Api, body: dict[str, object]) -> None:
    assert api.chat(max_tokens=1, **body).status_code == 200


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"typical_p": 0}, "typical_p"),
        ({"top_n_sigma": -1}, "top_n_sigma"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"penalty_window": -2}, "penalty_window"),
        ({"seed": 2**64}, "seed"),
        ({"seed": "1"}, "seed"),
        ({"n": 0}, "n"),
        ({"n": 65}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.0}, "max_tokens"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": 3}, "stop"),
        ({"stop_token_ids": [10**7]}, "token id"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"99999999": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"logprobs": 2}, "logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include": 1}}, "stream_options.include"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nope"}}}}, "nope"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0]"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"store": True}, "store"),
        ({"functions": [{}]}, "functions"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"reasoning_effort": "much"}, "reasoning_effort"),
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": [{"role": "nobody", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
        ({"chat_template_kwargs": {"messages": 1}}, "messages"),
    ],
)
def test_a_wrong_value_is_a_400_that_names_it(api: Api, body: dict[str, object], named: str) -> None:
    response = api.chat(**body)
    error = response.json()["error"]
    assert response.status_code == 400
    assert error["type"] == "invalid_request_error"
    assert named in error["message"] or error["param"] == named, error


def test_unknown_parameters_are_all_named(api: Api) -> None:
    error = api.chat(temprature=1, stop_words=[]).json()["error"]
    assert error["message"] == "unknown parameters: 'temprature', 'stop_words'"
    assert (error["code"], error["param"]) == ("unknown_parameter", "temprature")


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": 3}, "prompt"),
        ({"prompt": ["a"] * 33, "n": 2}, "33 prompts with n = 2"),
        ({"prompt": ["a"] * 65}, "65 prompts"),
        ({"best_of": 2}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"echo": True, "logprobs": 1}, "echo"),
        ({"messages": []}, "messages"),
    ],
)
def test_a_wrong_completion_is_a_400_that_names_it(api: Api, body: dict[str, object], named: str) -> None:
    response = api.complete(**body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert named in error["message"] or error["param"] == named, error


def test_another_model_is_a_404(api: Api) -> None:
    response = api.chat(model="gpt-9")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"messages": NaN}', b"\xff", b"[" * 100_000, b'"x"'])
def test_wrong_json_is_a_400(api: Api, body: bytes) -> None:
    response = api.request("POST", "/v1/chat/completions", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert "body" in response.json()["error"]["message"]


def test_another_content_type_is_refused(api: Api) -> None:
    """A page of another origin can send text/plain without asking; it gets nothing."""
    response = api.request("POST", "/v1/completions", content=b'{"prompt":"x"}', headers={"content-type": "text/plain"})
    assert response.status_code == 415


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions"])
def test_a_prompt_beyond_the_context_is_a_400(api: Api, route: str) -> None:
    long = "word " * 300
    body = {"messages": [{"role": "user", "content": long}]} if "chat" in route else {"prompt": long}
    response = api.post(route, body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", next(iter(body)))
    assert error["message"].endswith(
        "the context here is 256: shorten it; it is served with --context 256, the model allows 512"
    )


def test_a_prompt_that_leaves_room_for_one_token_is_served(api: Api) -> None:
    """A-43: max_tokens is reduced to what the context leaves."""
    assert api.complete(prompt=[5] * 256).json()["error"]["code"] == "context_length_exceeded"
    answer = api.complete(prompt=[5] * 255, max_tokens=100).json()
    assert answer["usage"]["completion_tokens"] == 1
    assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("max_tokens", [255, 10**6, 2**80])
def test_more_tokens_than_the_context_leaves_are_not_an_error(api: Api, max_tokens: int) -> None:
    """A-43: many clients always ask for as many as some model could give. The answer says that it was cut."""
    answers = [
        api.complete(max_tokens=max_tokens, ignore_eos=True).json(),
        api.chat(max_tokens=max_tokens, ignore_eos=True).json(),
        api.chat(max_completion_tokens=max_tokens, ignore_eos=True).json(),
    ]
    for answer in answers:
        assert answer["usage"]["total_tokens"] == 256
        assert answer["choices"][0]["finish_reason"] == "length"
