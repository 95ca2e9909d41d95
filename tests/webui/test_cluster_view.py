"""The picture of the cluster in a real browser: what it says, how it lies, how it reads."""

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest

from lamina.coordinator.api.state import Draining, Loading, Lost, Ready, ServiceState, StageProgress
from lamina.coordinator.model_file import ModelFile
from lamina.spec.model import LayerRange
from support.browser import Browser
from support.live_page import MIB, LivePage, described_workers, running_page
from support.scripted import text_script

RANGES = (LayerRange(0, 10), LayerRange(10, 11), LayerRange(11, 30))


@pytest.fixture(scope="module")
def _page(model: ModelFile) -> Iterator[LivePage]:
    with running_page(model, text_script(model, "ok " * 30), step_s=0.005) as page:
        yield page


@pytest.fixture
def page(_page: LivePage) -> LivePage:
    set_state(_page, Ready(_page.api.engine))
    return _page


def set_state(page: LivePage, state: ServiceState) -> None:
    def change() -> None:
        page.api.service.state = state

    page.call(change)


def open_cluster(browser: Browser, page: LivePage, num_cards: int) -> None:
    browser.go("about:blank")
    browser.go(page.url + "/#/cluster")
    browser.wait_for(f"document.querySelectorAll('.card').length === {num_cards}")


def cards(browser: Browser) -> list[str]:
    """The texts of each card, joined."""
    texts = browser.run(
        "[...document.querySelectorAll('.card')].map((c) => [...c.querySelectorAll('text')].map((t) => t.textContent))"
    )
    return [" | ".join(card) for card in texts]


def labels(browser: Browser) -> list[str]:
    """The texts on the edges."""
    return list(browser.run("[...document.querySelectorAll('.edge text')].map((t) => t.textContent)"))


def test_three_workers_in_pipeline_order(page: LivePage, browser: Browser) -> None:
    page.follow(described_workers(RANGES), [0.00021, 0.0123, 0.000085])
    open_cluster(browser, page, 3)
    first, second, third = cards(browser)
    assert first.startswith(
        "attic | stage 0 | layers 0–9 (10) | cuda · sm_61 | weights 3.03 GiB | cache 640 MiB | arena 190"
    )
    assert second.startswith("nas | stage 1 | layer 10 | cpu · avx512-vnni | weights 310 MiB | cache 64.0 MiB")
    assert "layers 11–29 (19)" in third
    # two looks, two seconds apart: 40 steps and 0.5 s inside the operations
    for card in (first, second, third):
        assert "busy 25 % · bubble 75 % | 20.0 steps/s" in card
    assert labels(browser) == ["0.21 ms", "12 ms", "tokens · 85 µs"]
    assert browser.run("document.querySelectorAll('.lost').length") == 0
    weights, track = browser.run(
        "['.part.weights', '.track'].map((s) => document.querySelector(s).getBoundingClientRect().width)"
    )
    assert weights / track == pytest.approx(3100 / (11 * 1024), abs=0.01)
    spoken = browser.run("document.querySelector('.picture svg').getAttribute('aria-label')")
    assert "worker nas, stage 1, layer 10, busy 25 %" in spoken
    assert "0.21 ms, 12 ms, 85 µs" in spoken
    assert browser.problems() == []


def test_a_lost_worker_is_marked_and_its_edges(page: LivePage, browser: Browser) -> None:
    """C-18: the one that is gone, by more than its colour."""
    workers = described_workers(RANGES)
    page.follow(workers, [0.0002] * 3)
    open_cluster(browser, page, 3)
    workers[2].is_lost = True
    page.look()
    set_state(page, Lost("worker laptop at 192.168.1.12:50051: connection lost"))
    browser.wait_for("document.querySelectorAll('.card.lost').length === 1")
    assert ["lost" in card for card in cards(browser)] == [False, False, True]
    assert "stage 2 · lost" in cards(browser)[2]
    assert "busy" not in cards(browser)[2]
    assert browser.run("document.querySelectorAll('.edge.lost').length") == 2
    browser.wait_for("document.getElementById('notice').textContent.includes('worker laptop at')")
    browser.wait_for("!document.querySelector('.picture').textContent.includes('busy')")  # nobody is, now


def test_loading_is_shown_per_worker(model: ModelFile, browser: Browser) -> None:
    """From the first second on, when nothing else is known of the workers."""
    with running_page(model, text_script(model, "ok")) as page:
        check_loading(page, browser)


def check_loading(page: LivePage, browser: Browser) -> None:
    stages = {
        i: StageProgress(i, f"w{i}", f"{10 * i}-{10 * i + 9}", done * MIB, 200 * MIB)
        for i, done in enumerate((200, 50))
    }
    set_state(page, Loading(stages))
    open_cluster(browser, page, 2)
    first, second = cards(browser)
    assert first == "w0 | stage 0 | layers 0–9 (10) | device not known yet | read 200 MiB of 200 MiB | 100 %"
    assert second.endswith("layers 10–19 (10) | device not known yet | read 50.0 MiB of 200 MiB | 25 %")
    assert browser.run("document.querySelector('.status').innerText").split() == ["loading", "62", "%"]
    set_state(page, Loading(waiting_for="2 worker(s) to join at 127.0.0.1:50050"))
    browser.wait_for(
        "document.getElementById('notice').textContent === 'Waiting for 2 worker(s) to join at 127.0.0.1:50050'"
    )
    set_state(page, Draining())
    browser.wait_for("document.getElementById('notice').textContent.includes('shuts down')")


def test_it_looks_every_second_while_it_is_seen(page: LivePage, browser: Browser) -> None:
    page.follow(described_workers(RANGES), [0.0002] * 3)
    open_cluster(browser, page, 3)

    def num_looks(seconds: float, before: str = "") -> int:
        browser.events.clear()
        browser.run(f"(() => {{ {before} return new Promise((done) => setTimeout(done, {1000 * seconds})) }})()")
        return sum(url.endswith("/admin/cluster") for url in browser.requested_urls())

    def becomes(state: str) -> str:
        return f"""Object.defineProperty(document, 'visibilityState', {{value: '{state}', configurable: true}});
          document.dispatchEvent(new Event('visibilitychange'));"""

    assert 2 <= num_looks(3.3) <= 4
    assert num_looks(1.5, becomes("hidden")) == 0
    assert num_looks(0.3, becomes("visible")) == 1


_OVERLAPS = """(() => {
  const bad = [];
  for (const card of document.querySelectorAll('.card')) {
    const frame = card.querySelector('.frame').getBoundingClientRect();
    const boxes = [...card.querySelectorAll('text')].map((t) => [t.textContent, t.getBoundingClientRect()]);
    for (const [text, box] of boxes) {
      const isInside = box.left >= frame.left + 4 && box.right <= frame.right - 4 && box.bottom <= frame.bottom;
      if (!isInside) bad.push(['outside', text]);
      for (const [other, its] of boxes) {
        const isBeside = box.right <= its.left || its.right <= box.left;
        const isBelow = box.bottom <= its.top + 3 || its.bottom <= box.top + 3;
        if (other !== text && !isBeside && !isBelow) bad.push([text, other]);
      }
    }
  }
  return bad;
})()"""


@pytest.mark.parametrize("width", [400, 900, 1280])
@pytest.mark.parametrize("count", [1, 3, 8])
def test_nothing_overlaps_or_overflows(page: LivePage, browser: Browser, width: int, count: int) -> None:
    workers = described_workers([LayerRange(10 * i, 10 * i + 10) for i in range(count)])
    page.follow(workers, [0.00021] * count if count > 1 else [])
    browser.resize(width, 800)
    open_cluster(browser, page, count)
    assert browser.run(_OVERLAPS) == []
    assert browser.run("document.querySelectorAll('.edge').length") == (count if count > 1 else 0)
    for view in ("#/cluster", "#/chat"):
        browser.run(f"location.hash = '{view}'")
        assert browser.run("document.documentElement.scrollWidth") <= width
        assert (
            browser.run(
                "Math.max(0, ...[...document.querySelectorAll('svg')].map((s) => s.getBoundingClientRect().right))"
            )
            <= width
        )


_CONTRASTS = """(() => {
  const parse = (color) => color.match(/[\\d.]+/g).map(Number);
  const light = (color) => {
    const linear = (v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    const [r, g, b] = color.slice(0, 3).map((v) => linear(v / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (element) => {
    for (let e = element; e; e = e.parentElement) {
      const color = parse(getComputedStyle(e).backgroundColor);
      if (color.length < 4 || color[3] > 0) return color;
    }
    return [255, 255, 255];
  };
  const found = [];
  const measure = (what, color, element) => {
    const [a, b] = [light(parse(color)), light(ground(element))].sort((x, y) => y - x);
    found.push([what, (a + 0.05) / (b + 0.05)]);
  };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !element.checkVisibility() || element.tagName === 'title') continue;
    const style = getComputedStyle(element);
    measure(walker.currentNode.data.trim(), element.ownerSVGElement ? style.fill : style.color, element);
  }
  for (const field of document.querySelectorAll('[placeholder]')) {
    if (field.checkVisibility()) measure(field.placeholder, getComputedStyle(field, '::placeholder').color, field);
  }
  return found;
})()"""


@pytest.mark.parametrize("is_dark", [False, True])
def test_every_text_has_the_contrast_of_aa(page: LivePage, browser: Browser, is_dark: bool) -> None:
    """WCAG 2 AA, 4.5 to 1, of whatever can be seen: chat, error, settings, cluster with a lost worker."""
    workers = described_workers(RANGES)
    workers[0].is_lost = True
    browser.set_dark(is_dark)
    page.follow(workers, [0.0002] * 3)
    browser.go(page.url)
    browser.wait_for("document.getElementById('status').textContent === 'ready'")
    browser.type("Why?")
    browser.press("Enter")
    browser.wait_for("document.querySelector('.turn.assistant[aria-busy=false]')")
    set_state(page, Lost("worker w0 is gone"))
    browser.type("Why?")
    browser.press("Enter")
    browser.wait_for("document.querySelector('.turn.unanswered')")
    browser.run("document.getElementById('settings-button').click()")
    found = list(browser.run(_CONTRASTS))
    browser.run("location.hash = '#/cluster'")
    browser.wait_for("document.querySelector('.card.lost')")
    found += browser.run(_CONTRASTS)
    assert len(found) > 60
    assert [entry for entry in found if entry[1] < 4.5] == []
    ground = browser.run("getComputedStyle(document.body).backgroundColor")
    assert (sum(json.loads(f"[{ground[4:-1]}]")) < 128) is is_dark


def test_a_worker_without_a_stage_stands_aside(page: LivePage, browser: Browser) -> None:
    workers = described_workers(RANGES)
    workers[2].profile = replace(workers[2].profile, stages=())
    page.follow([workers[2], *workers[:2]], [0.0002, 0.0002])
    open_cluster(browser, page, 3)
    assert [card.split(" | ")[:2] for card in cards(browser)] == [
        ["attic", "stage 0"],
        ["nas", "stage 1"],
        ["laptop", "unused"],
    ]
    assert "no layers" in cards(browser)[2]
    assert browser.run("document.querySelectorAll('.edge').length") == 2


def test_the_picture_follows_the_width_of_its_place(page: LivePage, browser: Browser) -> None:
    """Also when the settings open beside it, and without asking the server."""
    page.follow(described_workers(RANGES), [0.0002] * 3)
    open_cluster(browser, page, 3)
    width = "document.querySelector('.picture svg')?.clientWidth"
    wide = browser.run(width)
    browser.run("document.getElementById('settings-button').click()")
    browser.wait_for(f"{width} === {wide} - 320")
    assert browser.run(_OVERLAPS) == []
    browser.run("location.hash = '#/chat'")
    browser.resize(700, 800)
    browser.run("document.getElementById('settings-close').click()")
    browser.run("location.hash = '#/cluster'")
    browser.wait_for(f"{width} > 600 && {width} <= 700")
