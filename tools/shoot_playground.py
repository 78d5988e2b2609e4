"""Take the pictures of docs/playground.md, of a server that runs the model in the package.

    verbatim serve --draft ngram &
    python tools/shoot_playground.py http://127.0.0.1:8000 docs/images

Needs Playwright for Python, Chromium and Pillow.
"""

from __future__ import annotations

import io
import shutil
import sys
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright


def run(page: Any, **fields: Any) -> None:
    for name, value in fields.items():
        page.fill(f"#{name}", str(value))
    before = page.evaluate("numRuns")
    page.keyboard.press("Control+Enter")
    while page.evaluate(f"numRuns === {before} || going !== null"):
        page.wait_for_timeout(50)
    page.mouse.move(2, 2)


def one_run(page: Any) -> None:
    """One run, and what else could have stood at one place."""
    run(page, prompt="Once upon a time", seed=7, temperature=1, max_tokens=130)
    page.wait_for_timeout(1600)
    page.locator(".run .t.p3 b").nth(1).hover()


def two_runs(page: Any) -> None:
    """The same seed at another temperature."""
    run(page, prompt="Once upon a time", seed=7, temperature=1, max_tokens=90)
    page.get_by_role("button", name="Keep beside").click()
    run(page, temperature=1.2)
    page.wait_for_timeout(1600)


def in_numbers(page: Any) -> None:
    """A telephone: a replay, with the probabilities in numbers."""
    run(page, prompt="Once upon a time", seed=7, temperature=1, max_tokens=50)
    page.get_by_role("button", name="Replay").click()
    page.check("#tell")
    page.wait_for_timeout(800)
    page.evaluate("document.getElementById('runs').scrollIntoView()")


SHOTS = {
    "playground_light": (one_run, 1200, 760, "light"),
    "playground_dark": (two_runs, 1200, 860, "dark"),
    "playground_phone": (in_numbers, 360, 760, "light"),
}


def main(url: str, folder: Path) -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
        )
        for name, (act, width, height, scheme) in SHOTS.items():
            page = browser.new_page(
                viewport={"width": width, "height": height},
                color_scheme=scheme,
                device_scale_factor=1.5,
            )
            page.goto(url)
            page.wait_for_selector("#places li")
            act(page)
            picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
            colors = picture.quantize(
                192, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE
            )
            colors.save(folder / f"{name}.png", optimize=True)
            page.close()
        browser.close()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
