"""Take the pictures of the viewer for the README and the guide: `python docs/viewer_pictures.py runs/quickstart`.

A page of the run, as a browser without a window shows it; needs playwright and Chromium.
"""

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from fppo.report import view_page

PICTURES = Path(__file__).parent / "pictures"
WIDTH, HEIGHT = 1280, 800  # pixels


def main(run: str) -> None:
    """Write the pictures. Raises ValueError if no browser is found."""
    from playwright.sync_api import sync_playwright  # pyright: ignore[reportMissingImports]

    found = (shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome"))
    program = next(filter(None, found), None)
    if program is None:
        raise ValueError("Chromium must be on the PATH")
    with tempfile.TemporaryDirectory() as place, sync_playwright() as playwright:
        address = view_page.export([Path(run)], Path(place) / "page.html", most_bytes=64e6).as_uri()
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
        page.goto(address)
        page.wait_for_selector("body[data-opened]")
        picture(page, "viewer-overview")
        page.click("nav >> text=Rows")
        page.click("text=Lowest score")
        page.wait_for_selector(".detail")
        page.locator(".token").first.hover()
        picture(page, "viewer-rows")
        page.set_viewport_size({"width": 390, "height": 800})
        page.click("nav >> text=Rows")
        picture(page, "viewer-phone")
        browser.close()


def picture(page: Any, name: str) -> None:
    """Write a picture of the page, once it is drawn."""
    page.wait_for_timeout(600)
    page.screenshot(path=PICTURES / f"{name}.png")


if __name__ == "__main__":
    main(sys.argv[1])
