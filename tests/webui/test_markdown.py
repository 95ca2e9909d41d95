"""The Markdown renderer in a real browser: structure, hostile texts, texts that are still being written."""

import json
import random
from collections.abc import Iterator

import pytest

from lamina.coordinator.model_file import ModelFile
from support.browser import Browser
from support.live_page import running_page
from support.scripted import text_script

_LOAD = """import('/page/markdown.js').then(({renderMarkdown}) => {
  window.render = (text, target = document.createElement('div')) => { renderMarkdown(target, text); return target; };
})"""
TAGS = ["P", "H3", "H4", "H5", "H6", "UL", "OL", "LI", "PRE", "CODE", "STRONG", "EM", "BLOCKQUOTE", "HR"]
ATTRIBUTES = ["start", "tabindex", "data-language"]


@pytest.fixture(scope="module")
def _url(model: ModelFile) -> Iterator[str]:
    with running_page(model, text_script(model, "ok")) as page:
        yield page.url


@pytest.fixture
def page(browser: Browser, _url: str) -> Browser:
    browser.go(_url)
    browser.run(_LOAD)
    return browser


CASES = [
    ("one\ntwo\n\nthree", "<p>one\ntwo</p><p>three</p>"),
    ("# A\n## B *c*\ntext", "<h3>A</h3><h4>B <em>c</em></h4><p>text</p>"),
    ("a **b _c_** `d*e*`", "<p>a <strong>b <em>c</em></strong> <code>d*e*</code></p>"),
    ("***both*** and 2 * 3 * 4", "<p><strong><em>both</em></strong> and 2 * 3 * 4</p>"),
    ("snake_case_name and __init__", "<p>snake_case_name and <strong>init</strong></p>"),
    ("open **bold and *em* go on", "<p>open **bold and <em>em</em> go on</p>"),
    ("**a *b** c*", "<p><strong>a *b</strong> c*</p>"),
    (r"\*not\* `C:\` `` a`b ``", r"<p>*not* <code>C:\</code> <code>a`b</code></p>"),
    ("an open `tick", "<p>an open `tick</p>"),
    (
        "- a\n- b\n  - c\n\n    more\n- d",
        "<ul><li>a</li><li>b<ul><li><p>c</p><p>more</p></li></ul></li><li>d</li></ul>",
    ),
    ("3. x\n4. y\nlazy", '<ol start="3"><li>x</li><li>y\nlazy</li></ol>'),
    ("1. x\n\n2. y\n\nend", "<ol><li>x</li><li>y</li></ol><p>end</p>"),
    ("text\n- item", "<p>text</p><ul><li>item</li></ul>"),
    ("1. code:\n   ```\n   a\n     b\n   ```", '<ol><li>code:<pre tabindex="0"><code>a\n  b</code></pre></li></ol>'),
    (
        "```js\nif (a < b) {\n\n# no heading\n```\nend",
        '<pre data-language="js" tabindex="0"><code>if (a &lt; b) {\n\n# no heading</code></pre><p>end</p>',
    ),
    ("~~~\nstill being written", '<pre tabindex="0"><code>still being written</code></pre>'),
    ("``` inline ``` here", "<p><code>inline</code> here</p>"),
    ("> a\n> > b\n\nc", "<blockquote><p>a</p><blockquote><p>b</p></blockquote></blockquote><p>c</p>"),
    ("a\n\n---\n\n***", "<p>a</p><hr><hr>"),
    ("| a | b |\n|---|---|\n| 1 | 2 |", '<pre tabindex="0"><code>| a | b |\n|---|---|\n| 1 | 2 |</code></pre>'),
    ("[x](javascript:alert(1))", "<p>[x](javascript:alert(1))</p>"),
    ("<b onclick=x>&amp;</b>", "<p>&lt;b onclick=x&gt;&amp;amp;&lt;/b&gt;</p>"),
    ("", ""),
]


def test_what_becomes_of_each_form(page: Browser) -> None:
    made = page.run(f"{json.dumps([text for text, _ in CASES])}.map((text) => render(text).innerHTML)")
    for (text, expected), html in zip(CASES, made, strict=True):
        assert html == expected, text


def _random_texts(count: int) -> list[str]:
    pieces = ["*", "**", "_", "`", "```", "~~~", "\\", "\n", "\n\n", "  ", "    ", "- ", "1. ", "> ", "# ", "|", "---"]
    pieces += ["<img src=x onerror=alert(1)>", "<script>", "</p>", "&lt;", "a", "b c", "é", "😀", "[x](javascript:x)"]
    rng = random.Random(5)
    return ["".join(rng.choice(pieces) for _ in range(rng.randrange(1, 60))) for _ in range(count)]


def test_no_text_becomes_any_other_element(page: Browser) -> None:
    """Every element and attribute is one of the renderer's own, and no letter that is not markup gets lost."""
    found = page.run(f"""(() => {{
      const bad = [];
      for (const text of {json.dumps(_random_texts(1500))}) {{
        const made = render(text);
        const elements = [...made.querySelectorAll('*')];
        const isOurs = (e) => {json.dumps(TAGS)}.includes(e.tagName)
          && [...e.attributes].every((a) => {json.dumps(ATTRIBUTES)}.includes(a.name));
        const letters = (s) => (s.match(/[a-zé😀]/gu) ?? []).join('');
        if (!elements.every(isOurs)) bad.push(['element', text, made.innerHTML]);
        if (letters(made.textContent).length < letters(text).length && !/[`~]/.test(text)) bad.push(['lost', text]);
      }}
      return bad;
    }})()""")
    assert found == []
    assert page.problems() == []


def test_a_text_that_grows_ends_as_if_it_had_come_at_once(page: Browser) -> None:
    """And what is finished keeps its elements."""
    texts = [text for text, _ in CASES] + _random_texts(60)
    found = page.run(f"""(() => {{
      const bad = [];
      for (const text of {json.dumps(texts)}) {{
        const target = document.createElement('div');
        for (let end = 0; end <= text.length; end += 1) render(text.slice(0, end), target);
        if (target.innerHTML !== render(text).innerHTML) bad.push(text);
      }}
      return bad;
    }})()""")
    assert found == []
    assert page.run("""(() => {
      const target = render('first\\n\\nsecond');
      const [first, second] = target.children;
      render('first\\n\\nsecond and more', target);
      return target.children[0] === first && target.children[1] !== second;
    })()""")


def test_long_texts_take_linear_time(page: Browser) -> None:
    """50,000 characters of each kind of mark, with and without an end, are drawn in well under a second each."""
    units = [
        "*",
        "**a ",
        "_a",
        "`",
        "` ``",
        "\\",
        "#",
        "# ",
        "- ",
        "> ",
        "|",
        "~",
        "-",
        " ",
        "\n",
        "1. \n ",
        "- a\n",
        "*a* ",
    ]
    texts = [unit * (50_000 // len(unit)) + end for unit in units for end in ("", "x")]
    slow = page.run(f"""(() => {json.dumps(texts)}.map((text) => {{
      const start = performance.now();
      render(text);
      return [text.slice(0, 8), performance.now() - start];
    }}).filter(([, ms]) => ms > 1500))()""")
    assert slow == []
