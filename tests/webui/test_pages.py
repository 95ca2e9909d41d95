"""The page's files as they are served: policy, caching, the key, and what they refer to. No browser needed."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from lamina.coordinator.api.pages import PAGE_FILES
from lamina.coordinator.api.settings import ApiSettings
from lamina.coordinator.model_file import ModelFile
from support.scripted import Api, text_script

FOLDER = Path(__file__).parents[2] / "coordinator/lamina/coordinator/webui"
SOURCES = sorted(path for path in FOLDER.iterdir() if path.suffix in (".html", ".js", ".css", ".svg"))


@pytest.fixture
def api(model: ModelFile) -> Iterator[Api]:
    with Api(model, text_script(model, "ok"), settings=ApiSettings(api_key="s3cret")) as api:
        yield api


def test_every_file_is_served_under_a_strict_policy_and_without_the_key(api: Api) -> None:
    assert len(PAGE_FILES) == len(SOURCES)
    for source in SOURCES:
        path = "/" if source.name == "index.html" else f"/page/{source.name}"
        response = api.get(path)
        assert (response.status_code, response.content) == (200, source.read_bytes())
        policy = dict(part.strip().split(" ", 1) for part in response.headers["content-security-policy"].split(";"))
        assert policy["default-src"] == "'self'"
        assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
        assert not any("unsafe" in value or "*" in value or "http" in value for value in policy.values())
        assert response.headers["x-content-type-options"] == "nosniff"
    assert api.get("/").headers["content-type"].startswith("text/html")
    assert api.get("/page/main.js").headers["content-type"].startswith("text/javascript")


def test_the_rest_still_wants_the_key(api: Api) -> None:
    for path in ("/admin/cluster", "/page", "/page/", "/page/../v1/models", "/page/other.js", "/index.html"):
        assert api.get(path).status_code == 401, path
    assert api.get("/page/%2e%2e/api/gate.py", headers={"authorization": "Bearer s3cret"}).status_code == 404


def test_what_a_browser_has_is_not_sent_again(api: Api) -> None:
    etag = api.get("/").headers["etag"]
    again = api.get("/", headers={"if-none-match": etag})
    assert (again.status_code, again.content) == (304, b"")
    assert api.get("/", headers={"if-none-match": '"old"'}).status_code == 200
    head = api.request("HEAD", "/")
    assert (head.status_code, head.headers["etag"]) == (200, etag)
    assert api.post("/", {}).status_code == 405


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
def test_the_sources_refer_to_nothing_elsewhere_and_never_parse_markup(source: Path) -> None:
    text = source.read_text()
    addresses = set(re.findall(r"(?:https?:)?//[a-z][\w.]*\.[a-z]+[^\"\s]*", text))
    assert addresses <= {"http://www.w3.org/2000/svg"}
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function|localStorage", text
    )
    assert not re.search(r"\sstyle=|\son\w+=\"", text)  # what the policy would refuse
    assert len(text.splitlines()) <= 400
    for name in re.findall(r"(?:src|href)=\"(page/[^\"]+)\"|from \"\./([^\"]+)\"", text):
        assert (FOLDER / (name[0].removeprefix("page/") or name[1])).is_file(), name
