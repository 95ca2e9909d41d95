"""The chat in a real browser, over a scripted engine behind the real HTTP API."""

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from lamina.coordinator.api.settings import ApiSettings
from lamina.coordinator.api.state import Loading
from lamina.coordinator.model_file import ModelFile
from lamina.coordinator.text.chat import ChatEncoder
from lamina.coordinator.text.template import ChatTemplate
from lamina.spec.errors import WorkerLost
from support.browser import Browser
from support.live_page import LivePage, running_page
from support.scripted import text_script

ANSWER = "It is **blue**:\n\n- one\n- two <b>x</b>\n\n```py\nx = 1\n```\n"
LONG = "and so on " * 120


@pytest.fixture
def page(model: ModelFile, browser: Browser) -> Iterator[LivePage]:
    with running_page(model, text_script(model, ANSWER)) as page:
        open_chat(browser, page)
        yield page


@pytest.fixture
def slow_page(model: ModelFile, browser: Browser) -> Iterator[LivePage]:
    with running_page(model, text_script(model, LONG), step_s=0.01) as page:
        open_chat(browser, page)
        yield page


def open_chat(browser: Browser, page: LivePage) -> None:
    browser.go(page.url)
    browser.wait_for("document.getElementById('status').textContent === 'ready'")


def ask(browser: Browser, text: str) -> None:
    browser.run("document.getElementById('prompt').focus()")
    browser.type(text)
    browser.press("Enter")


def note(browser: Browser) -> str:
    return str(browser.run("[...document.querySelectorAll('.turn.assistant .note')].at(-1)?.textContent ?? ''"))


def wait_for_answer(browser: Browser, count: int = 1) -> None:
    browser.wait_for(f"document.querySelectorAll('.turn.assistant[aria-busy=false]').length === {count}")


def sent_bodies(browser: Browser) -> list[dict[str, Any]]:
    """The chat requests so far."""
    requests = [e["params"]["request"] for e in browser.events if e.get("method") == "Network.requestWillBeSent"]
    return [json.loads(request["postData"]) for request in requests if request["url"].endswith("/chat/completions")]


def set_field(browser: Browser, name: str, value: str) -> None:
    browser.run(f"document.querySelector('[name={name}]').focus()")
    browser.run(f"document.querySelector('[name={name}]').select()")
    browser.type(value)


def test_thoughts_stand_apart_from_the_answer(model: ModelFile, browser: Browser) -> None:
    source = "{% for m in messages %}{{ m.content }}{% endfor %}{# </think> #}"
    thinking = replace(model, chat=ChatEncoder(model.tokenizer, ChatTemplate(source, "", "")))
    with running_page(thinking, text_script(thinking, "<think>\nHm, <b>well</b>.\n</think>\n\nYes.")) as page:
        open_chat(browser, page)
        ask(browser, "Why?")
        wait_for_answer(browser)
        assert browser.run("document.querySelector('.turn.assistant .thought div').textContent") == "Hm, <b>well</b>."
        assert browser.run("document.querySelector('.turn.assistant .body').textContent") == "Yes."
        ask(browser, "And?")
        wait_for_answer(browser, 2)
        history = sent_bodies(browser)[-1]["messages"]
    assert [message["content"] for message in history if message["role"] == "assistant"] == ["Yes."]


def test_an_answer_is_drawn_as_it_comes_and_measured(page: LivePage, browser: Browser) -> None:
    ask(browser, "Why?")
    wait_for_answer(browser)
    html = browser.run("document.querySelector('.turn.assistant .body').innerHTML")
    assert html == (
        "<p>It is <strong>blue</strong>:</p><ul><li>one</li><li>two &lt;b&gt;x&lt;/b&gt;</li></ul>"
        '<pre data-language="py" tabindex="0"><code>x = 1</code></pre>'
    )
    assert "tokens/s" in note(browser)
    num_tokens = len(page.api.model.tokenizer.encode(ANSWER, add_special=False, parse_special=False))
    assert note(browser).startswith(f"{num_tokens + 1} tokens · ")  # and the end of text
    assert browser.problems() == []
    assert all(url.startswith(page.url) for url in browser.requested_urls())


def test_keys_and_turns(page: LivePage, browser: Browser) -> None:
    """Enter sends, Shift+Enter does not; later turns carry the earlier ones."""
    ask(browser, "  ")
    assert sent_bodies(browser) == []
    browser.type("first")
    browser.press("Enter", shift=True)
    browser.type("line two")
    browser.press("Enter")
    wait_for_answer(browser)
    assert browser.run("document.getElementById('prompt').value") == ""
    assert browser.run("document.activeElement.id") == "prompt"
    ask(browser, "again")
    wait_for_answer(browser, 2)
    first, second = sent_bodies(browser)
    assert first["messages"] == [{"role": "user", "content": "first\nline two"}]
    assert [m["role"] for m in second["messages"]] == ["user", "assistant", "user"]
    assert second["messages"][1]["content"] == ANSWER
    assert set(first) == {"messages", "stream", "stream_options"}
    browser.run("document.getElementById('new-chat').click()")
    assert browser.run("document.querySelectorAll('.turn').length") == 0
    ask(browser, "anew")
    wait_for_answer(browser)
    assert len(sent_bodies(browser)[2]["messages"]) == 1


def test_the_sampling_panel_is_what_is_sent(page: LivePage, browser: Browser) -> None:
    browser.run("document.getElementById('settings-button').click()")
    values = {
        "system": "Be brief.",
        "temperature": "0.5",
        "top_p": "0.9",
        "top_k": "40",
        "seed": "7",
        "max_tokens": "3",
    }
    for name, value in values.items():
        set_field(browser, name, value)
    ask(browser, "Hi")
    wait_for_answer(browser)
    (body,) = sent_bodies(browser)
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert {name: body[name] for name in values if name != "system"} == {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "seed": 7,
        "max_tokens": 3,
    }
    assert page.api.last_add.sampling.seed == 7
    assert note(browser).startswith("cut at the token limit · 3 tokens")
    # what is out of range is not sent, and the panel opens at it
    browser.run("document.getElementById('settings-close').click()")
    browser.run("document.querySelector('[name=top_p]').value = '3'")
    ask(browser, "Hi")
    assert browser.run("document.activeElement.name") == "top_p"
    assert len(sent_bodies(browser)) == 1
    # the rest survives a reload in this tab
    open_chat(browser, page)
    assert browser.run("document.querySelector('[name=system]').value") == "Be brief."
    browser.run("document.getElementById('settings-reset').click()")
    assert browser.run("sessionStorage.getItem('lamina.settings').includes('Be brief')") is False


def test_a_stop_ends_the_generation_and_keeps_what_came(slow_page: LivePage, browser: Browser) -> None:
    """B-36: the stop reaches the engine; the next turn carries the part that came."""
    scheduler = slow_page.api.engine.scheduler
    ask(browser, "Go on")
    browser.wait_for("document.querySelector('.turn.assistant .body')?.textContent.length > 20")
    assert browser.run("[document.getElementById('send').hidden, document.getElementById('stop').hidden]") == [
        True,
        False,
    ]
    browser.wait_for("document.querySelector('.turn.assistant .note').textContent.includes('about')")
    browser.press("Escape")
    wait_for_answer(browser)
    assert note(browser).startswith("stopped · about ")
    part = browser.run("document.querySelector('.turn.assistant .body').textContent")
    assert len(part) < len(LONG) / 2
    end_s = time.monotonic() + 5
    while slow_page.call(lambda: scheduler.num_running):
        assert time.monotonic() < end_s
    ask(browser, "More")
    browser.wait_for("document.querySelectorAll('.turn.assistant').length === 2")
    browser.run("document.getElementById('stop').click()")
    wait_for_answer(browser, 2)
    assert sent_bodies(browser)[1]["messages"][1]["content"].strip() == part.strip()


def test_a_new_chat_while_an_answer_comes(slow_page: LivePage, browser: Browser) -> None:
    ask(browser, "Go on")
    browser.wait_for("document.querySelector('.turn.assistant .body')?.textContent.length > 5")
    browser.run("document.getElementById('new-chat').click()")
    assert browser.run("document.querySelectorAll('.turn').length") == 0
    assert browser.run("document.getElementById('send').hidden") is False
    ask(browser, "Other")
    browser.wait_for("document.querySelector('.turn.assistant .body')?.textContent.length > 5")
    assert len(sent_bodies(browser)[1]["messages"]) == 1
    assert browser.run("document.getElementById('stop').hidden") is False  # the old one's end is not the new one's


def test_a_refusal_is_shown_and_the_text_comes_back(page: LivePage, browser: Browser) -> None:
    def load() -> None:
        page.api.service.state = Loading()

    page.call(load)
    ask(browser, "Hello?")
    browser.wait_for("document.querySelector('.turn.assistant .error')?.hidden === false")
    assert "the model is loading" in browser.run("document.querySelector('.turn.assistant .error').textContent")
    assert browser.run("document.getElementById('prompt').value") == "Hello?"
    browser.wait_for("document.getElementById('status').textContent === 'loading'")


def test_a_worker_lost_in_mid_answer_is_named(slow_page: LivePage, browser: Browser) -> None:
    """C-18: what came stays, the reason stands below it."""
    ask(browser, "Go on")
    browser.wait_for("document.querySelector('.turn.assistant .body')?.textContent.length > 5")
    slow_page.call(lambda: slow_page.api.pipeline.fail(WorkerLost("worker w1 (layers 15-29): connection lost")))
    browser.wait_for("document.querySelector('.turn.assistant .error')?.hidden === false")
    assert "w1 (layers 15-29)" in browser.run("document.querySelector('.turn.assistant .error').textContent")
    assert "and so on" in browser.run("document.querySelector('.turn.assistant .body').textContent")
    browser.wait_for("document.getElementById('status').textContent === 'unavailable'")


def test_the_server_that_goes_is_said(model: ModelFile, browser: Browser) -> None:
    with running_page(model, text_script(model, ANSWER)) as page:
        open_chat(browser, page)
    browser.wait_for("document.getElementById('status').textContent === 'no connection'")
    ask(browser, "Hello?")
    browser.wait_for("document.querySelector('.turn.assistant .error')?.textContent.includes('does not answer')")


def test_the_key_is_asked_for_and_kept_in_this_tab_only(model: ModelFile, browser: Browser) -> None:
    with running_page(model, text_script(model, "fine"), ApiSettings(api_key="s3cret")) as page:
        browser.go(page.url)
        browser.wait_for("document.getElementById('status').textContent === 'API key needed'")
        assert browser.run("document.activeElement.name") == "api_key"
        browser.type("s3cret")
        browser.press("Tab")
        browser.wait_for("document.getElementById('status').textContent === 'ready'")
        assert browser.run("sessionStorage.getItem('lamina.settings').includes('s3cret')")
        assert browser.run("localStorage.length + document.cookie.length") == 0
        browser.run("document.getElementById('settings-close').click()")
        ask(browser, "Hi")
        wait_for_answer(browser)
        assert browser.run("document.querySelector('.turn.assistant .body').textContent") == "fine"
        assert all("s3cret" not in url for url in browser.requested_urls())
