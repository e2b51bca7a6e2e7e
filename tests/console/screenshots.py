"""The pictures of docs/console.md, made anew: python -m tests.console.screenshots"""

from __future__ import annotations

import shutil
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from playwright.sync_api import Browser, Page, sync_playwright

from tests.console.conftest import FLAGS, TOKEN, busy, gateway_for, load
from tests.service import Service

DIR = Path(__file__).parents[2] / "docs" / "images"
LOADED_S = 45.0


def opened(browser: Browser, service: Service, width: int, height: int, scheme: str) -> Page:
    """The board, with some history."""
    page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)  # type: ignore[arg-type]
    page.goto(f"{service.admin}/console")
    page.fill("#token", TOKEN)
    page.click("#login button")
    page.wait_for_selector("#link.live")
    return page


def main() -> None:
    """Three: wide and light, wide and dark with a request opened, and as on a telephone."""
    DIR.mkdir(exist_ok=True)
    program = shutil.which("chromium")
    with ExitStack() as stack, sync_playwright() as playwright:
        service = gateway_for(stack, Path(stack.enter_context(TemporaryDirectory())))
        browser = playwright.chromium.launch(executable_path=program, args=FLAGS)
        pages = [
            opened(browser, service, 1440, 1280, "light"),
            opened(browser, service, 1440, 1000, "dark"),
            opened(browser, service, 360, 780, "light"),
        ]
        stopped = threading.Event()
        loading = threading.Thread(target=_go_on, args=(service, stopped))
        loading.start()
        with busy(service):
            pages[0].wait_for_timeout(LOADED_S * 1000)
            pages[0].screenshot(path=DIR / "console-light.png")
            pages[2].screenshot(path=DIR / "console-360.png")
            pages[1].get_by_role("button", name="slow").first.click()
            pages[1].wait_for_selector("#request[open]")
            pages[1].screenshot(path=DIR / "console-dark.png")
            stopped.set()
            loading.join()
        browser.close()


def _go_on(service: Service, stopped: threading.Event) -> None:
    while not stopped.is_set():
        load(service)
        time.sleep(0.3)


if __name__ == "__main__":
    main()
