"""A headless Chromium for the tests of the page; they are skipped, and say so, where there is none."""

import base64
import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from report_cases import make_run

from bicovg.report.collect import read_runs
from bicovg.report.page import render_page

SCREENSHOTS = Path(__file__).parent.parent.parent / "build" / "screenshots"


class Browser:
    """Chromium by its driver, with what the tests ask of it."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def command(self, name: str, **parameters: Any) -> Any:
        return self.driver.execute_cdp_cmd(name, parameters)

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def show(self, width: int = 1400, dark: bool = False, media: str = "") -> None:
        """Set the width of the screen and what the reader prefers."""
        mobile = width < 600
        self.command("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=mobile)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.command("Emulation.setEmulatedMedia", media=media, features=[scheme])

    def open(self, address: str) -> None:
        self.driver.get_log("browser")
        self.driver.get_log("performance")
        self.driver.get(address)
        self.size()

    def size(self) -> dict[str, float]:
        """How large the page is, once it was laid out: a browser just started may say 0 before."""
        end = time.monotonic() + 15.0
        while True:
            size: dict[str, float] = self.command("Page.getLayoutMetrics")["cssContentSize"]
            if size["width"] > 0 and size["height"] > 0:
                return size
            assert time.monotonic() < end, f"the page was never laid out: {size}"
            time.sleep(0.1)

    def complaints(self) -> list[str]:
        """What stands on the console."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requests(self) -> list[str]:
        """Every address that was asked for since ``open``, data: addresses left out."""
        found = []
        for entry in self.driver.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                found.append(message["params"]["request"]["url"])
        return [address for address in found if not address.startswith("data:")]

    def screenshot(self, name: str, whole: bool = True) -> None:
        """The whole page, or what is in sight of it, kept for people to look at."""
        size = self.size()
        clip = {"x": 0, "y": 0, "width": size["width"], "height": min(size["height"], 8000), "scale": 1}
        options = {"captureBeyondViewport": True, "clip": clip} if whole else {}
        shot = self.command("Page.captureScreenshot", **options)
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        (SCREENSHOTS / f"{name}.png").write_bytes(base64.b64decode(shot["data"]))

    def wait(self, script: str, seconds: float = 15.0) -> Any:
        """Until the script returns something true."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if found := self.run(script):
                return found
            time.sleep(0.1)
        raise AssertionError(f"never true: {script}")


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    webdriver = pytest.importorskip("selenium.webdriver", reason="the page's tests need selenium")
    binary = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    driver_path = shutil.which("chromedriver")
    if binary is None or driver_path is None:
        pytest.skip("no Chromium here: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-dev-shm-usage"):
        options.add_argument(flag)
    options.add_argument("--window-size=1400,900")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver_path))
    yield Browser(driver)
    driver.quit()


@pytest.fixture
def browser(chromium: Browser) -> Iterator[Browser]:
    """A fresh state of the one browser."""
    chromium.show()
    yield chromium
    chromium.command("Emulation.setScriptExecutionDisabled", value=False)
    chromium.driver.get("about:blank")


@pytest.fixture(scope="session")
def make_page(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Writes the page of made-up runs, given as keyword arguments of ``make_run``; returns its address."""

    def make(*runs: dict[str, Any]) -> str:
        folder = tmp_path_factory.mktemp("pages")
        paths = [make_run(folder / f"run{index}", **settings) for index, settings in enumerate(runs)]
        page = folder / "page.html"
        page.write_text(render_page(read_runs(paths)))
        return page.as_uri()

    return make


THREE = (
    {"recipe": "tiny-imagenet-per-channel", "epochs": 90, "lift": -6.0},
    {"recipe": "tiny-imagenet-bicovg", "epochs": 90},
    {"recipe": "tiny-imagenet-hgb4", "epochs": 90, "lift": 2.0},
)


@pytest.fixture(scope="session")
def deep_page(make_page: Callable[..., str]) -> str:
    """One run of 400 epochs and 16 blocks."""
    return make_page({"recipe": "tiny-imagenet-bicovg", "epochs": 400})


@pytest.fixture(scope="session")
def three_page(make_page: Callable[..., str]) -> str:
    return make_page(*THREE)
