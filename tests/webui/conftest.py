"""One Chromium for all tests of the page, a fresh page with an empty storage for each."""

from collections.abc import Iterator

import pytest

from lamina.coordinator.model_file import ModelFile, open_model_file
from support.browser import Browser, find_chromium, open_browser
from support.models import smollm2_path


@pytest.fixture(scope="session")
def model() -> ModelFile:
    """The tokenizer and chat template of the default model; no weights are read."""
    return open_model_file(smollm2_path())


@pytest.fixture(scope="session")
def _chromium() -> Iterator[Browser]:
    program = find_chromium()
    if program is None:
        pytest.skip("no Chromium on this machine; on Debian: apt-get install chromium")
    with open_browser(program) as browser:
        yield browser


@pytest.fixture
def browser(_chromium: Browser) -> Browser:
    _chromium.open_page()
    return _chromium
