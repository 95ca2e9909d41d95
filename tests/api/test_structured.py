"""response_format: what comes out follows the schema, what cannot be enforced is refused with the request."""

import asyncio
import json
import re
import threading
import time
from contextlib import suppress
from functools import partial

import pytest

from lamina.coordinator.api.grammar import embedded_schema, schema_grammar
from lamina.coordinator.model_file import ModelFile
from lamina.spec.errors import InvalidRequest
from support.scripted import Api, text_script

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def _nested(depth: int) -> object:
    schema: object = {"type": "integer"}
    for _ in range(depth):
        schema = {"not": schema}
    return schema


def json_schema(schema: object) -> dict[str, object]:
    return {"type": "json_schema", "json_schema": {"name": "thing", "strict": True, "schema": schema}}


@pytest.mark.parametrize("route", ["chat", "complete"])
def test_a_strict_schema_holds_whatever_the_model_wants(bytes_model: ModelFile, route: str) -> None:
    """Logits that want prose, and random ones besides, still give a person."""
    with Api(bytes_model, text_script(bytes_model, "Sure! Here is one: ..."), random_logits=True) as api:
        for seed in range(3):
            body = getattr(api, route)(response_format=json_schema(PERSON), seed=seed, max_tokens=200).json()
            (choice,) = body["choices"]
            assert choice["finish_reason"] == "stop"
            person = json.loads(choice["message"]["content"] if route == "chat" else choice["text"])
            assert set(person) == {"name", "age"}
            assert 0 <= person["age"] <= 120


def test_json_object(model: ModelFile) -> None:
    with Api(model, text_script(model, '{"a": [1, 2], "b": null}')) as api:
        choice = api.chat(response_format={"type": "json_object"}, temperature=0).json()["choices"][0]
        assert json.loads(choice["message"]["content"]) == {"a": [1, 2], "b": None}
        assert choice["finish_reason"] == "stop"
    with Api(model, text_script(model, "[1, 2]")) as api:
        choice = api.chat(response_format={"type": "json_object"}, temperature=0, max_tokens=1).json()["choices"][0]
        assert choice["message"]["content"].startswith("{")


def test_white_space_is_bounded(model: ModelFile) -> None:
    """A model that wants only spaces must leave them after 16 characters."""
    brace, space = (model.tokenizer.encode(t, add_special=False, parse_special=False)[0] for t in ("{", " "))
    with Api(model, lambda _, place: space if place else brace) as api:
        choice = api.chat(response_format={"type": "json_object"}, temperature=0, max_tokens=60).json()["choices"][0]
        assert re.match(r'\{ {1,16}["}]', choice["message"]["content"])


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "nonsense"}, "nonsense"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"$ref": "#/nowhere"}, "nowhere"),
        ({"type": "string", "pattern": "("}, "regex"),
        ({"type": "object", "properties": 3}, "properties"),
        (_nested(200), "recursion"),
        ({"type": "integer", "minimum": 10**400}, "number out of range"),
        ({"enum": ["x" * 2**18]}, "at most 262144"),
        ({"type": "integer", "multipleOf": 999_983}, "rounder divisors"),
        ({"type": "number", "multipleOf": 0.0099991}, "rounder divisors"),
        ({"allOf": [{"type": "integer", "multipleOf": 997}, {"multipleOf": 991}]}, "rounder divisors"),
        ({"anyOf": [{"type": "integer", "multipleOf": 9973, "minimum": i} for i in range(11)]}, "rounder divisors"),
        ({"type": "integer", "multipleOf": 0}, "invalid multiple of"),
        ({"type": "integer", "multipleOf": True}, "multipleOf"),
        ({"type": "integer", "multipleOf": 10**400 + 1}, "rounder divisors"),
        ({"patternProperties": {f"^{i}[a-z]*$": {} for i in range(101)}}, "101 patternProperties, at most 100"),
    ],
)
def test_a_schema_nobody_can_follow_is_a_400(model: ModelFile, schema: object, reason: str) -> None:
    with Api(model, text_script(model, "x")) as api:
        response = api.chat(response_format=json_schema(schema))
        assert response.status_code == 400
        assert reason in response.json()["error"]["message"]
        assert not api.pipeline.adds


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "multipleOf": 5_000_000},
        {"type": "number", "multipleOf": 0.0001},
        {"type": "integer", "multipleOf": 9973},
        {"type": "object", "patternProperties": {f"^{i:03}[a-z]*$": {} for i in range(100)}},
    ],
)
def test_the_most_that_a_costly_keyword_may_ask_for_takes_no_second(model: ModelFile, schema: object) -> None:
    with Api(model, text_script(model, "x")) as api:
        start_s = time.process_time()
        assert api.chat(response_format=json_schema(schema), max_tokens=1).status_code == 200
        assert time.process_time() - start_s < 1


@pytest.mark.parametrize(
    "divisors",
    [
        [10**4200 + 1 + 2 * i for i in range(60)],
        [10**4299] * 60,
        [10**4200 + 1 + 2 * i for i in range(300)],
    ],
    ids=["large", "round", "too long"],
)
def test_what_is_refused_for_its_cost_costs_nothing(divisors: list[int]) -> None:
    schema = {"anyOf": [{"multipleOf": divisor} for divisor in divisors]}
    for build in (schema_grammar, partial(embedded_schema, strict=False)):
        start_s = time.process_time()
        with suppress(InvalidRequest):
            build(schema)
        assert time.process_time() - start_s < 1


def test_a_costly_keyword_in_a_tools_parameters_is_a_400(model: ModelFile) -> None:
    parameters = {"type": "object", "properties": {"n": {"type": "integer", "multipleOf": 999_983}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    with Api(model, text_script(model, "x")) as api:
        response = api.chat(tools=[tool], tool_choice="required")
        assert response.status_code == 400
        assert "rounder divisors" in response.json()["error"]["message"]


@pytest.mark.parametrize("divisor", [float("inf"), float("nan")])
def test_a_divisor_that_is_no_number(divisor: float) -> None:
    """Python's JSON has them, nobody else's."""
    with pytest.raises(InvalidRequest, match="the JSON schema cannot be enforced"):
        schema_grammar({"type": "integer", "multipleOf": divisor})


def test_nobody_waits_for_the_grammar_of_another(model: ModelFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sequence comes to the last stage only when it is compiled; answers go on meanwhile."""
    may_go_on = threading.Event()
    with Api(model, text_script(model, "{}")) as api:
        compile_now = api.pipeline.grammars._compile

        def compile_later(grammar: str, generated: list[int]) -> object:
            assert may_go_on.wait(20)
            return compile_now(grammar, generated)

        monkeypatch.setattr(api.pipeline.grammars, "_compile", compile_later)

        async def scenario() -> None:
            structured = asyncio.create_task(
                api.client.post("/v1/completions", json={"prompt": "Hi", "response_format": {"type": "json_object"}})
            )
            for _ in range(3):
                plain = await api.client.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 2})
                assert plain.status_code == 200
            assert not structured.done()
            may_go_on.set()
            assert (await structured).json()["choices"][0]["text"] == "{}"

        api.run(scenario())


def test_a_forced_call_and_a_format_exclude_each_other(model: ModelFile) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    with Api(model, text_script(model, "x")) as api:
        response = api.chat(tools=[tool], tool_choice="required", response_format={"type": "json_object"})
        assert response.status_code == 400
        assert "response_format" in response.json()["error"]["message"]
