"""Take the pictures of the viewer for README and pages, as a browser without a window shows it.

    python docs/viewer_pictures.py quickstart runs/quickstart
    python docs/viewer_pictures.py reading runs/reference/any_expression/seed_0    # of docs/reference.md, as the next
    python docs/viewer_pictures.py turns runs/reference/second_chance/seed_0

It needs playwright and Chromium.
"""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tyro
from tyro.conf import Positional

from fppo.report import view_page

PICTURES = Path(__file__).parent / "pictures"
WIDTH, HEIGHT = 1280, 800  # pixels
WRONG = "score.math_verify=1 score.regular_expression=0"  # rows without an answer at their end


def quickstart(run: Positional[Path]) -> None:
    """The overview, the rows and a phone's page of the quickstart. Raises ValueError if no browser is found."""
    with opened(run) as page:
        picture(page, "viewer-overview")
        page.click("nav >> text=Rows")
        page.click("text=Lowest score")
        page.wait_for_selector(".detail")
        page.locator(".token").first.hover()
        picture(page, "viewer-rows")
        page.set_viewport_size({"width": 390, "height": 800})
        page.click("nav >> text=Rows")
        picture(page, "viewer-phone")


def reading(run: Positional[Path], steps: tuple[int, ...] = (1, 15, 30)) -> None:
    """Rows that a lenient reading of `math_verify` scores as right, at some steps. Raises as above."""
    with opened(run) as page:
        page.click("nav >> text=Rows")
        for step in steps:
            page.fill("#filter", f"step={step} {WRONG}")
            page.locator(".rows > *").first.click()
            page.wait_for_selector(".detail")
            picture(page, f"reference-rows-{step}")


def turns(run: Positional[Path], step: int = 11) -> None:
    """A response of two turns of which the second one scores. Raises as above."""
    with opened(run) as page:
        page.click("nav >> text=Rows")
        page.fill("#filter", f"step={step} score=0.5")
        page.locator(".rows > *").first.click()
        page.wait_for_selector(".detail")
        page.locator(".token").first.scroll_into_view_if_needed()
        picture(page, "reference-turns")


@contextmanager
def opened(run: Path) -> Iterator[Any]:
    """The viewer of a run in a window."""
    from playwright.sync_api import sync_playwright  # pyright: ignore[reportMissingImports]

    found = (shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome"))
    program = next(filter(None, found), None)
    if program is None:
        raise ValueError("Chromium must be on the PATH")
    with tempfile.TemporaryDirectory() as place, sync_playwright() as playwright:
        address = view_page.export([run], Path(place) / "page.html", most_bytes=64e6).as_uri()
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
        page.goto(address)
        page.wait_for_selector("body[data-opened]")
        yield page
        browser.close()


def picture(page: Any, name: str) -> None:
    """Write a picture of the page, once it is drawn."""
    page.wait_for_timeout(600)
    page.screenshot(path=PICTURES / f"{name}.png")


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict({"quickstart": quickstart, "reading": reading, "turns": turns})
