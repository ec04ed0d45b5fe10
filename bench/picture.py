"""Records the README's animated picture of the web page while `canvasrt serve` runs.

Needs playwright, pillow and a Chromium.
"""

from __future__ import annotations

import io
import shutil
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, expect, sync_playwright

PROMPT, SEED = "shuffle abdeghkl", "3"
SIZE = {"width": 760, "height": 560}
STEP, END = 350, 2500  # milliseconds that a frame is shown


def measure(url: str, out: Path) -> None:
    """Ask one question, then take a picture of every denoising step."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        page = browser.new_page(viewport=SIZE)
        page.goto(url)
        expect(page.locator("#light")).to_have_class("on", timeout=60_000)
        page.fill("#prompt", PROMPT)
        page.locator("#seed").evaluate("(each, seed) => { each.value = seed }", SEED)
        page.click("#go")
        expect(page.locator("#f-total")).not_to_have_text("–", timeout=60_000)
        frames = [_frame(page, step) for step in range(_last(page) + 1)]
        browser.close()
    durations = [STEP] * (len(frames) - 1) + [END]
    frames[0].save(
        out,
        save_all=True,
        append_images=frames[1:],
        duration=durations,
        loop=0,
        quality=80,
        method=6,
    )


def _last(page: Page) -> int:
    return int(page.get_attribute("#slider", "max") or 0)


def _frame(page: Page, step: int) -> Image.Image:
    page.locator("#slider").evaluate(
        "(each, step) => { each.value = step; each.dispatchEvent(new Event('input')) }", step
    )
    page.wait_for_timeout(250)  # until colours have faded
    return Image.open(io.BytesIO(page.screenshot())).convert("RGB")
