"""A real browser, and helpers for the page at `/`."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from canvasrt.containers.serve.frontend import FrontEnd
from tests.helpers.serving import needs_triton

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
MARKS = [
    pytest.mark.acceptance,
    needs_triton,
    pytest.mark.skipif(CHROMIUM is None, reason="needs a browser: apt install chromium"),
]
DESKTOP, PHONE = (1200, 860), (360, 740)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with sync_api.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.fixture
def visit(browser: Any) -> Iterator[Any]:
    """Provide a function that opens the page. At the end, check that no script failed and that no other site was
    called."""
    contexts, problems, addresses = [], [], []

    def visit(front: FrontEnd, size: tuple[int, int] = DESKTOP, scheme: str = "light") -> Any:
        width, height = size
        context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme
        )
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(60_000)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda request: addresses.append(request.url))
        page.goto(address(front))
        return page

    yield visit
    for context in contexts:
        context.close()
    assert problems == []
    assert all(re.match(r"http://127\.0\.0\.1:\d+/|data:", each) for each in addresses)


def address(front: FrontEnd) -> str:
    return front.url.removesuffix("/v1") + "/"


def ask(page: Any, prompt: str, **fields: str) -> None:
    """Send a prompt and wait for the whole answer."""
    from playwright.sync_api import expect

    expect(page.locator("#light")).to_have_class("on", timeout=60_000)
    page.fill("#prompt", prompt)
    page.locator("#settings").evaluate("each => { each.open = true }")
    for name, value in fields.items():
        page.fill(f"#{name}", value)
    page.click("#go")
    expect(page.locator("#f-total")).not_to_have_text("–", timeout=60_000)
