"""TensorBoard in a real browser: headless Chromium on a port of its own."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from selenium import webdriver
from selenium.common.exceptions import TimeoutException
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.support.ui import WebDriverWait

from tests.commands import running

SECONDS = 60
LOADS = 3
TEXT = """
const found = [];
(function walk(node) {
    if (node.shadowRoot) walk(node.shadowRoot);
    for (const child of node.childNodes) {
        if (child.nodeType === Node.TEXT_NODE) found.push(child.textContent.trim());
        else if (!['STYLE', 'SCRIPT', 'TEMPLATE'].includes(child.nodeName)) walk(child);
    }
})(document.body);
return found.filter(text => text).join('\\n');
"""


def missing() -> str | None:
    """Why there is no browser here, or None."""
    lacking = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return f"{' and '.join(lacking)} not found: apt-get install chromium chromium-driver" if lacking else None


@contextmanager
def tensorboard(*runs: Path) -> Iterator[str]:
    """`fastslow tensorboard RUN...` on a free port, for as long as it is entered; yields its address."""
    with running("tensorboard", *runs, "--port", "0") as process:
        assert process.stdout is not None
        for line in process.stdout:
            if found := re.search(r"http://localhost:\d+/", line):
                yield found[0]
                return
        raise AssertionError("TensorBoard ended without an address")


class Browser:
    """One page at a time."""

    def __init__(self, driver: webdriver.Chrome):
        self.driver = driver

    def open(self, address: str, *texts: str) -> str:
        """Load a page, wait until it shows all of these texts, return all of its text, shadow roots included.

        A page that was loaded before TensorBoard had read the run does not ask again: it is loaded anew.
        """
        for _ in range(LOADS):
            self.driver.get("about:blank")  # an address that differs only after # would not be loaded anew
            self.driver.get(address)
            with suppress(TimeoutException):
                WebDriverWait(self.driver, SECONDS).until(lambda _: all(text in self.text() for text in texts))
                return self.text()
        raise AssertionError(f"{address} never showed all of {texts}")

    def row(self, heading: str, name: str, cells: int) -> list[str]:
        """Wait for the first row below a table's last heading; its cells, the name first."""
        found: list[str] = []

        def is_there(_: object) -> bool:
            lines = self.text().splitlines()
            start = lines.index(heading) + 1 if heading in lines else len(lines)
            found[:] = lines[start : start + cells]
            return len(found) == cells and found[0] == name

        WebDriverWait(self.driver, SECONDS).until(is_there, f"no row {name} below {heading}")
        return found

    def until(self, script: str) -> None:
        """Wait until this JavaScript returns true."""
        WebDriverWait(self.driver, SECONDS).until(lambda driver: driver.execute_script(script), script)

    def text(self) -> str:
        return str(self.driver.execute_script(TEXT))


@contextmanager
def browser(width: int = 1400, height: int = 1000) -> Iterator[Browser]:
    """Chromium without a window, with an empty profile, that asks nothing of the network."""
    with tempfile.TemporaryDirectory(prefix="chromium_") as profile:
        options = webdriver.ChromeOptions()
        options.binary_location = shutil.which("chromium") or ""
        for argument in (
            "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
            "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-quic",
            f"--window-size={width},{height}", f"--user-data-dir={profile}",
        ):  # fmt: skip
            options.add_argument(argument)
        driver = webdriver.Chrome(options, Service(shutil.which("chromedriver")))
        try:
            yield Browser(driver)
        finally:
            driver.quit()
