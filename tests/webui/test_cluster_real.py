"""The page before a real cluster: two workers and a server as processes, one of the workers killed."""

import pytest

from support.browser import Browser
from support.models import smollm2_path
from support.server import running_cluster

pytestmark = pytest.mark.e2e
QUESTION = "What is the capital of France?"


def test_the_page_of_a_running_cluster(browser: Browser) -> None:
    """C-18: an answer of the model, the split as it was made, the lost worker among those that are not."""
    with running_cluster(
        smollm2_path(), extra=["--context", "256", "--parallel", "2", "--split", "0-19,20-29"]
    ) as cluster:
        browser.go(cluster.url)
        browser.wait_for("document.getElementById('status').textContent === 'ready'")
        browser.run("document.querySelector('[name=max_tokens]').value = '8'")
        browser.run("document.querySelector('[name=temperature]').value = '0'")
        browser.type(QUESTION)
        browser.press("Enter")
        browser.wait_for("document.querySelector('.turn.assistant[aria-busy=false]')")
        body = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 8, "temperature": 0}
        answer = cluster.request("/v1/chat/completions", body)[1]["choices"][0]["message"]["content"]
        assert browser.run("document.querySelector('.turn.assistant .body').textContent") == answer.strip()
        assert "tokens/s" in browser.run("document.querySelector('.turn.assistant .note').textContent")

        browser.run("location.hash = '#/cluster'")
        browser.wait_for("document.querySelectorAll('.card').length === 2")
        picture = "document.querySelector('.picture').textContent"
        browser.wait_for(f"{picture}.includes('layers 0–19 (20)') && {picture}.includes('layers 20–29 (10)')")
        assert browser.run("document.querySelectorAll('.edge text').length") == 2  # there and back, with round trips
        assert browser.run("/\\d ms|\\d µs/.test(document.querySelector('.edge text').textContent)")

        cluster.workers[1].kill()
        browser.wait_for("document.getElementById('status').textContent === 'unavailable'")
        lost = "[...document.querySelectorAll('.card.lost .name')].map((t) => t.textContent).join()"
        browser.wait_for(f"{lost} === 'w1'")  # w0 is there still, it only lost its pipeline
        assert cluster.workers[1].address in browser.run("document.getElementById('notice').textContent")
        refused = [text for text in browser.problems() if "503" not in text]
        assert refused == []
