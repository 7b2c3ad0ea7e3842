"""A real browser, where this machine has one."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")


def executable() -> str | None:
    """The browser of this machine."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


@contextmanager
def browsing() -> Iterator[Any]:
    """A browser without a window; the test is skipped, and says so, where there is none."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is in the extra dev")
    path = executable()
    if path is None:
        pytest.skip("no chromium on this machine: apt-get install chromium fonts-inter")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


class Window:
    """A page that keeps what it complained of and whom it asked."""

    def __init__(self, browser: Any, width: int = 1100, scheme: str = "light") -> None:
        self.page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("dialog", lambda dialog: self.complaints.append(dialog.message))
        self.page.on("request", lambda request: self.requests.append(request.url))
