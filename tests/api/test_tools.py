"""Tool calls: prompts, forced calls, finding calls in text however it is cut."""

import json
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from lamina.coordinator.api.tools import FORMATS, TaggedCallParser, WholeCallParser, format_of, make_parser
from lamina.coordinator.model_file import ModelFile
from lamina.coordinator.text.chat import ChatEncoder
from lamina.coordinator.text.template import ChatTemplate
from support.scripted import CONFIG, Api, events_of, text_script

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather now",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 10}, "days": {"$ref": "#/$defs/count"}},
            "required": ["city"],
            "additionalProperties": False,
            "$defs": {"count": {"type": "integer", "minimum": 1, "maximum": 9}},
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "get_time"}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
QUEST = [{"role": "user", "content": "Weather?"}]
HERMES, LLAMA3 = FORMATS
LONG = replace(CONFIG, max_context=1024)
NAMES = frozenset(("get_weather", "get_time"))


@pytest.fixture
def api(model: ModelFile) -> Iterator[Api]:
    with Api(model, text_script(model, f"I look.\n{CALL}\n{CALL}"), config=LONG) as api:
        yield api


def test_calls_in_an_answer(api: Api) -> None:
    choice = api.chat(messages=QUEST, tools=[WEATHER], temperature=0).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "I look."
    calls = choice["message"]["tool_calls"]
    assert [call["function"] for call in calls] == [{"name": "get_weather", "arguments": '{"city": "Paris"}'}] * 2
    assert len({call["id"] for call in calls}) == 2
    assert all(call["type"] == "function" for call in calls)


def test_calls_in_a_stream(api: Api) -> None:
    content, calls = "", []
    for event in events_of(api.chat(messages=QUEST, tools=[WEATHER], temperature=0, stream=True)):
        delta = event["choices"][0]["delta"]
        content += delta.get("content", "")
        calls += delta.get("tool_calls", [])
    assert content == "I look."
    assert [call["index"] for call in calls] == [0, 1]
    assert json.loads(calls[0]["function"]["arguments"]) == {"city": "Paris"}
    assert event["choices"][0]["finish_reason"] == "tool_calls"


def test_without_tools_a_call_is_text(api: Api) -> None:
    for body in ({}, {"tools": [WEATHER], "tool_choice": "none"}, {"tools": [CLOCK]}):
        choice = api.chat(messages=QUEST, temperature=0, **body).json()["choices"][0]
        assert choice["message"]["content"] == f"I look.\n{CALL}\n{CALL}"
        assert choice["finish_reason"] == "stop"
        assert "tool_calls" not in choice["message"]


def test_a_template_without_tools_gets_them_in_a_system_message(api: Api, model: ModelFile) -> None:
    api.chat(messages=QUEST, tools=[WEATHER, CLOCK], max_tokens=1)
    prompt = model.tokenizer.decode(api.last_prompt)
    assert prompt.count("<|im_start|>system") == 1
    assert json.dumps(WEATHER) in prompt
    assert json.dumps(CLOCK) in prompt
    api.chat(messages=[{"role": "system", "content": "Be brief."}, *QUEST], tools=[CLOCK], max_tokens=1)
    prompt = model.tokenizer.decode(api.last_prompt)
    assert prompt.startswith("<|im_start|>system\nBe brief.\n\n")
    assert prompt.count("<|im_start|>system") == 1


def test_earlier_calls_and_their_results_are_in_the_prompt(api: Api, model: ModelFile) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}}
    messages = [
        *QUEST,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "snow"},
    ]
    api.chat(messages=messages, tools=[WEATHER], max_tokens=1)
    prompt = model.tokenizer.decode(api.last_prompt)
    assert '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>' in prompt
    assert "<tool_response>\nsnow\n</tool_response>" in prompt


def test_a_template_with_tools_prints_them_itself(model: ModelFile) -> None:
    """Arguments of earlier calls arrive as objects: Qwen's template prints them with tojson."""
    source = (
        "{% for t in tools or [] %}[{{ t | tojson }}]{% endfor %}{% for m in messages %}{{ m.role }}:{{ m.content }}"
        "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.arguments | tojson }}{% endfor %};{% endfor %}"
    )
    tokenizer = model.tokenizer
    template = ChatTemplate(source, "", "")
    knowing = replace(model, chat=ChatEncoder(tokenizer, template))
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}}
    with Api(knowing, text_script(model, CALL)) as api:
        assert api.service.model.tool_format is HERMES
        messages = [*QUEST, {"role": "assistant", "content": None, "tool_calls": [call]}]
        answer = api.chat(messages=messages, tools=[CLOCK, WEATHER], temperature=0).json()
        prompt = tokenizer.decode(api.last_prompt)
    assert (
        prompt == f'[{json.dumps(CLOCK)}][{json.dumps(WEATHER)}]user:Weather?;assistant:<tool_call>{{"city": "Oslo"}};'
    )
    assert answer["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "get_weather"


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"get_weather", "get_time"}),
        ({"type": "function", "function": {"name": "get_time"}}, {"get_time"}),
        ({"type": "function", "function": {"name": "get_weather"}}, {"get_weather"}),
    ],
)
def test_a_forced_call_is_one_whatever_the_model_wants(bytes_model: ModelFile, choice: object, names: set[str]) -> None:
    """Random logits under a forced tool_choice always give a call whose arguments fit the schema."""
    script = text_script(bytes_model, "no call at all, just text")
    with Api(bytes_model, script, random_logits=True, config=replace(LONG, max_context=2048)) as api:
        for seed in range(4):
            body = api.chat(messages=QUEST, tools=[WEATHER, CLOCK], tool_choice=choice, seed=seed, max_tokens=300)
            answer = body.json()["choices"][0]
            if answer["finish_reason"] == "length":
                continue  # a free-form object of random characters need not end
            (call,) = answer["message"]["tool_calls"]
            assert answer["finish_reason"] == "tool_calls"
            assert answer["message"]["content"] is None
            assert call["function"]["name"] in names
            arguments = json.loads(call["function"]["arguments"])
            if call["function"]["name"] == "get_weather":
                assert set(arguments) <= {"city", "days"}
                assert 1 <= arguments.get("days", 1) <= 9


def test_several_forced_calls_only_if_wished(api: Api) -> None:
    api.chat(messages=QUEST, tools=[CLOCK], tool_choice="required", max_tokens=1)
    assert "call*" not in api.last_add.grammar.replace(" ", "").replace(")", "")
    api.chat(messages=QUEST, tools=[CLOCK], tool_choice="required", parallel_tool_calls=True, max_tokens=1)
    assert 'start: call ("\\n" call)*' in api.last_add.grammar


def test_an_unknown_forced_function_is_a_400(api: Api) -> None:
    choice = {"type": "function", "function": {"name": "other"}}
    response = api.chat(messages=QUEST, tools=[CLOCK], tool_choice=choice)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "tool_choice")


def test_a_strict_tool_with_a_schema_that_cannot_be_enforced_is_a_400(api: Api) -> None:
    function = {"name": "f", "parameters": {"type": "array", "uniqueItems": True}}
    tool = {"type": "function", "function": function}
    assert api.chat(messages=QUEST, tools=[tool], tool_choice="required", max_tokens=1).status_code == 200
    tool["function"] = {**function, "strict": True}
    response = api.chat(messages=QUEST, tools=[tool], tool_choice="required")
    assert response.status_code == 400
    assert "uniqueItems" in response.json()["error"]["message"]


# -- the parsers

TEXTS = [
    "no calls here",
    "a < b and <tool_c is no tag  ",
    CALL,
    f"first\n\n{CALL}  {CALL}\n",
    f"{CALL}\nand then",
    f"{CALL[:-13]}",
    "<tool_call>\nnot json\n</tool_call> after",
    " <tool_call>{}</tool_call>",
    '{"name": "get_weather", "parameters": {"city": "Rome"}}',
    '  {"name": "nobody", "parameters": {}} ',
    '{"just": "json"}',
    "{ not json",
    "   \n  ",
]


def parse(text: str, parser: TaggedCallParser | WholeCallParser, cuts: list[int]) -> tuple[str, list[tuple[str, str]]]:
    shown, calls = "", []
    for start, stop in zip([0, *cuts], [*cuts, len(text)], strict=True):
        piece, found = parser.push(text[start:stop])
        shown, calls = shown + piece, [*calls, *found]
    piece, found = parser.finish()
    return shown + piece, [(call.name, call.arguments) for call in [*calls, *found]]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_how_the_text_is_cut_changes_nothing(text: str, form: object) -> None:
    """Every cut into pieces gives the same text and the same calls as one piece."""
    whole = parse(text, make_parser(form, NAMES), [])  # type: ignore[arg-type]
    rng = random.Random(text)
    assert parse(text, make_parser(form, NAMES), list(range(1, len(text)))) == whole  # type: ignore[arg-type]
    for _ in range(20):
        cuts = sorted(rng.sample(range(len(text)), k=min(len(text), 4)))
        assert parse(text, make_parser(form, NAMES), cuts) == whole  # type: ignore[arg-type]


def test_what_tagged_calls_leave_as_text() -> None:
    def outcome(text: str) -> tuple[str, int]:
        shown, calls = parse(text, TaggedCallParser(HERMES, NAMES), [])
        return shown, len(calls)

    assert outcome(f"first\n\n{CALL}  {CALL}\n") == ("first", 2)
    assert outcome(f"{CALL}\nand then") == ("\nand then", 1)
    assert outcome(CALL[:-13]) == ("", 1)  # not closed, but complete
    assert outcome("<tool_call>\nnot json\n</tool_call> after") == ("<tool_call>\nnot json\n</tool_call> after", 0)
    assert outcome("a < b and <tool_c is no tag  ") == ("a < b and <tool_c is no tag  ", 0)


def test_what_whole_calls_leave_as_text() -> None:
    def outcome(text: str) -> tuple[str, list[tuple[str, str]]]:
        return parse(text, WholeCallParser(LLAMA3, NAMES), [])

    assert outcome(TEXTS[8]) == ("", [("get_weather", '{"city": "Rome"}')])
    for text in TEXTS[9:]:
        assert outcome(text) == (text, [])


def test_families_by_their_templates(model: ModelFile) -> None:
    assert format_of("{{ tools }} <tool_call>") is HERMES
    assert format_of('<|start_header_id|>{% if tools %}"parameters": {% endif %}') is LLAMA3
    assert format_of(model.chat.template.source).name == "generic"
