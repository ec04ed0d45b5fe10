"""The layout of the page at `/`, on a desktop and on a phone."""

from __future__ import annotations

import re
from typing import Any

import pytest

from canvasrt.containers.serve.frontend import FrontEnd
from tests.helpers.web_page import MARKS, PHONE, ask

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytestmark = MARKS


def test_padding_is_shown_when_asked_for(front: FrontEnd, visit: Any) -> None:
    page = visit(front)
    ask(page, "12+34=", steps="4", tokens="32")
    page.evaluate("show(run.frames.push({ ...run.frames.at(-1), end: 3 }) - 1)")
    assert page.locator("#canvas b:visible").count() == 3
    page.check("#padding")
    assert page.locator("#canvas b:visible").count() == 32


def test_it_fits_a_phone(front: FrontEnd, visit: Any) -> None:
    page = visit(front, PHONE)
    ask(page, "12+34=", steps="4")
    widths = page.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")
    assert widths == [360, 360]
    assert page.locator("#go").bounding_box()["width"] > 300
    # Lines break between words, never within a word.
    rows = page.evaluate("""() => {
        const noisy = Array.from({ length: 60 }, (_, i) => (i % 2 ? "ness" : " dark"));
        show(run.frames.push({ ...run.frames.at(-1), block: 0, noisy, states: noisy.map(() => "settled"), end: 60 }) - 1);
        return [...$("canvas").children].map((each) => [...each.getClientRects()].at(-1).top);
    }""")
    assert rows[::2] == rows[1::2]
    assert len(set(rows)) > 4


def test_examples_break_between_words(front: FrontEnd, visit: Any) -> None:
    page = visit(front, PHONE)
    sync_api.expect(page.locator("#examples button")).to_have_count(3)
    cut = page.evaluate("""() => [...document.querySelectorAll("#examples button")].flatMap((each) =>
        [...each.textContent.matchAll(/\\S+/g)].filter(({ 0: word, index }) => {
            const range = new Range();
            range.setStart(each.firstChild, index);
            range.setEnd(each.firstChild, index + word.length);
            const parts = range.getClientRects();
            return parts.length > 1 || parts[0].right > each.getBoundingClientRect().right
                || parts[0].right > innerWidth;
        }).map(String))""")
    assert cut == []


def test_it_is_dark_in_the_dark(front: FrontEnd, visit: Any) -> None:
    def brightness(page: Any, part: str) -> float:
        color = page.evaluate(f"getComputedStyle(document.body).{part}")
        return sum(map(int, re.findall(r"\d+", color)[:3])) / 3

    light, dark = visit(front), visit(front, scheme="dark")
    assert brightness(light, "backgroundColor") > 200 > 100 > brightness(light, "color")
    assert brightness(dark, "backgroundColor") < 50 < 200 < brightness(dark, "color")
