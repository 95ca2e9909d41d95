"""What the endurance run calls wrong: judged on answers made by hand."""

import json
import random

import pytest
from soak import growth_mib
from traffic import Api, Reply, Traffic, Wish


@pytest.fixture
def traffic() -> Traffic:
    return Traffic(Api("127.0.0.1:1"), random.Random(1))


def whole(*ends: str, tokens: int = 3, content: str = "{}") -> Reply:
    choices = [{"finish_reason": end, "message": {"content": content}} for end in ends]
    body = {"choices": choices, "usage": {"completion_tokens": tokens}}
    return Reply(200, b"", json.dumps(body).encode())


def test_a_whole_answer(traffic: Traffic) -> None:
    wish = Wish("chat", "/", {"max_tokens": 4}, num_choices=2)
    assert traffic._judge(wish, whole("stop", "length")) == ""
    assert "ended with ['stop']" in traffic._judge(wish, whole("stop"))
    assert "usage" in traffic._judge(wish, whole("stop", "stop", tokens=9))
    assert "HTTP 500" in traffic._judge(wish, Reply(500, b"", b"{}"))
    assert traffic.num_tokens == 3


def test_an_answer_by_a_schema(traffic: Traffic) -> None:
    wish = Wish("schema", "/", {"max_tokens": 4})
    assert traffic._judge(wish, whole("stop", content='{"name": "a", "age": 1, "ok": true}')) == ""
    assert "not by the schema" in traffic._judge(wish, whole("stop", content='{"name": "a"}'))
    assert "no JSON" in traffic._judge(wish, whole("stop", content='{"name'))
    assert traffic._judge(wish, whole("length", content='{"name')) == ""


def test_a_stream(traffic: Traffic) -> None:
    wish = Wish("chat", "/", {"max_tokens": 4, "stream": True})
    end = {"choices": [{"finish_reason": "stop"}]}
    usage = {"choices": [], "usage": {"completion_tokens": 2}}
    events = [b"data: " + json.dumps(event).encode() + b"\n\n" for event in (end, usage)]
    body = b": ping\n\n" + b"".join(events)
    assert traffic._judge(wish, Reply(200, b"", body + b"data: [DONE]\n\n")) == ""
    assert "the stream ends with" in traffic._judge(wish, Reply(200, b"", body))


def test_a_bad_request_wants_an_error_object(traffic: Traffic) -> None:
    wish = Wish("bad", "/", {}, status=400)
    assert traffic._judge(wish, Reply(400, b"", b'{"error": {}}')) == ""
    assert "no error object" in traffic._judge(wish, Reply(400, b"", b"oops"))
    assert "HTTP 200" in traffic._judge(wish, whole("stop"))


def test_every_kind_is_drawn_and_only_known_parameters_are_sent(traffic: Traffic) -> None:
    wishes = [traffic._draw() for _ in range(300)]
    assert {wish.kind for wish in wishes} == {"chat", "completion", "prefix", "long", "schema", "several", "bad"}
    assert {wish.body.get("stream", False) for wish in wishes} == {True, False}


def test_growth_is_of_the_last_third() -> None:
    assert growth_mib([10, 90, 100, 100, 101, 100]) == pytest.approx(0.5)
    assert growth_mib([10, 20, 30, 40, 50, 60]) == pytest.approx(20)
