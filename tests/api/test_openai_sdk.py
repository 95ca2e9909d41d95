"""Contract: OpenAI's own client against a live cluster of two workers."""

import json
import time
from collections.abc import Iterator

import openai
import pytest

from lamina.coordinator.model_file import ModelFile
from support.models import smollm2_path
from support.server import Cluster, running_cluster

pytestmark = pytest.mark.e2e

MESSAGES = [{"role": "user", "content": "What is two plus two?"}]
KEY = "test-key"
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with running_cluster(smollm2_path(), extra=["--context", "512", "--parallel", "4", "--api-key", KEY]) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def client(cluster: Cluster) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{cluster.url}/v1", api_key=KEY, max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def name(client: openai.OpenAI) -> str:
    (model,) = client.models.list().data
    return model.id


def test_chat(client: openai.OpenAI, name: str) -> None:
    answer = client.chat.completions.create(model=name, messages=MESSAGES, temperature=0, max_tokens=24)
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason in ("stop", "length")
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details is not None


def test_chat_stream_equals_the_whole(client: openai.OpenAI, name: str) -> None:
    """Greedy twice: once whole, once streamed with usage."""
    whole = client.chat.completions.create(model=name, messages=MESSAGES, temperature=0, max_tokens=24)
    chunks = list(
        client.chat.completions.create(
            model=name,
            messages=MESSAGES,
            temperature=0,
            max_completion_tokens=24,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].model_extra is not None
    assert chunks[-1].model_extra["timings"]["predicted_n"] == whole.usage.completion_tokens
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == whole.choices[0].finish_reason


def test_the_stream_helper_of_the_sdk(client: openai.OpenAI, name: str) -> None:
    with client.chat.completions.stream(
        model=name, messages=MESSAGES, temperature=0, max_tokens=100, stop="."
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert "content.delta" in kinds
    assert final.choices[0].message.content


def test_same_seed_same_choices(client: openai.OpenAI, name: str) -> None:
    def draw(seed: int) -> list[str | None]:
        answer = client.chat.completions.create(
            model=name, messages=MESSAGES, temperature=1.2, seed=seed, n=2, max_tokens=12
        )
        return [choice.message.content for choice in answer.choices]

    first = draw(11)
    assert draw(11) == first
    assert first[0] != first[1]
    assert draw(12) != first


def test_stop_logprobs_and_bias(client: openai.OpenAI, name: str, model: ModelFile) -> None:
    (token,) = model.tokenizer.encode(" cat", add_special=False, parse_special=False)
    answer = client.chat.completions.create(
        model=name,
        messages=MESSAGES,
        temperature=0,
        max_tokens=5,
        logit_bias={str(token): 100},
        logprobs=True,
        top_logprobs=3,
    )
    (choice,) = answer.choices
    assert choice.message.content == " cat" * 5
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert [entry.token for entry in choice.logprobs.content] == [" cat"] * 5
    assert all(len(entry.top_logprobs) == 3 for entry in choice.logprobs.content)
    first = choice.logprobs.content[0]
    assert first.logprob < first.top_logprobs[-1].logprob  # of the distribution before the bias
    stopped = client.chat.completions.create(
        model=name, messages=MESSAGES, temperature=0, max_tokens=9, logit_bias={str(token): 100}, stop=["t cat cat"]
    )
    assert (stopped.choices[0].message.content, stopped.choices[0].finish_reason) == (" ca", "stop")


def test_strict_schema(client: openai.OpenAI, name: str) -> None:
    schema = {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 20},
            "population": {"type": "integer", "minimum": 0, "maximum": 99999999},
        },
        "required": ["city", "population"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model=name,
        messages=[{"role": "user", "content": "Name a city and its population as JSON."}],
        temperature=1,
        seed=3,
        max_tokens=100,
        response_format={"type": "json_schema", "json_schema": {"name": "city", "strict": True, "schema": schema}},
    )
    document = json.loads(answer.choices[0].message.content or "")
    assert set(document) == {"city", "population"}
    assert isinstance(document["population"], int)
    assert answer.choices[0].finish_reason == "stop"


def test_a_forced_tool_call(client: openai.OpenAI, name: str) -> None:
    answer = client.chat.completions.create(
        model=name,
        messages=[{"role": "user", "content": "Weather in Paris?"}],
        tools=[WEATHER],
        tool_choice="required",
        temperature=0,
        max_tokens=80,
    )
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls or ()
    assert call.type == "function"
    assert call.function.name == "get_weather"
    assert set(json.loads(call.function.arguments)) == {"city"}


def test_completions(client: openai.OpenAI, name: str) -> None:
    answer = client.completions.create(
        model=name, prompt=["One, two, three,", "A, B, C,"], n=2, temperature=0.3, seed=1, max_tokens=6, logprobs=2
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert all(choice.logprobs is not None and len(choice.logprobs.tokens or ()) == 6 for choice in answer.choices)
    chunks = list(client.completions.create(model=name, prompt="One, two,", temperature=0, max_tokens=6, stream=True))
    whole = client.completions.create(model=name, prompt="One, two,", temperature=0, max_tokens=6)
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text


def test_errors_are_the_sdks_own(client: openai.OpenAI, cluster: Cluster, name: str) -> None:
    with pytest.raises(openai.BadRequestError, match="context"):
        client.chat.completions.create(model=name, messages=[{"role": "user", "content": "word " * 600}])
    with pytest.raises(openai.BadRequestError, match="unknown parameter"):
        client.chat.completions.create(model=name, messages=MESSAGES, extra_body={"wat": 1})
    with pytest.raises(openai.NotFoundError, match="not served here"):
        client.chat.completions.create(model="other", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError, match="no embeddings"):
        client.embeddings.create(model=name, input="x")
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="wrong", max_retries=0).models.list()


def test_a_client_that_goes_away_frees_the_cluster(client: openai.OpenAI, cluster: Cluster, name: str) -> None:
    """The request leaves the engine, and every worker forgets the sequence."""
    stream = client.chat.completions.create(
        model=name, messages=MESSAGES, max_tokens=400, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    headers = {"Authorization": f"Bearer {KEY}"}
    end = time.monotonic() + 15
    while time.monotonic() < end:
        state = cluster.request("/admin/cluster", headers=headers)[1]
        stages_are_empty = state["stages"] and all(stage["num_sequences"] == 0 for stage in state["stages"])
        if state["num_requests_running"] == 0 and state["kv_cache_usage_ratio"] == 0 and stages_are_empty:
            return
        time.sleep(0.1)
    raise AssertionError(f"something stayed: {state}")
