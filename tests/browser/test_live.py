"""The live page in a real browser: new epochs appear in it, and what the reader did to it stays."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from report_cases import append_epoch, make_run

from bicovg.watch import Server

EXITS = [0, 1, 2, 3]
CARD = "document.querySelector('[id^=card-accuracy-by-block]')"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)  # a page also shows the benchmarks of its recipe that lie where it is made
    return make_run(tmp_path / "run", epochs=6, done=2)


@pytest.fixture
def server(run: Path) -> Iterator[Server]:
    with Server(run, 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def test_a_new_epoch_appears_without_reload(browser: Any, server: Server, run: Path) -> None:
    browser.open(server.address)
    assert "2 / 6" in browser.run("return document.querySelector('#tiles').textContent")
    browser.run("window.same = true; window.scrollTo(0, 300)")
    browser.run(f"{CARD}.querySelectorAll('.legend button')[1].click()")
    append_epoch(run, 2, 6, EXITS)
    browser.wait("return document.querySelector('#tiles').textContent.includes('3 / 6')")
    assert browser.run("return window.same")
    assert browser.run("return window.scrollY") == 300
    assert browser.run(f"return JSON.parse({CARD}.querySelector('.plot').dataset.hover).x") == ["1", "2", "3"]
    assert browser.run(f"return {CARD}.querySelectorAll('.legend button')[1].getAttribute('aria-pressed')") == "false"
    assert browser.run(f"return getComputedStyle({CARD}.querySelector('[data-s=\"1\"]')).display") == "none"
    assert browser.complaints() == []
    assert {address.removeprefix(server.address) for address in browser.requests()} == {"", "live"}


def test_a_chart_that_appears_with_the_first_epoch_is_usable(
    browser: Any, server: Server, run: Path, tmp_path: Path
) -> None:
    fresh = make_run(tmp_path / "fresh", epochs=6, done=0)
    server.page.run = fresh
    browser.open(server.address)
    assert browser.run("return document.querySelectorAll('.plot').length") == 0
    append_epoch(fresh, 0, 6, EXITS)
    browser.wait("return document.querySelectorAll('.plot').length > 2")
    browser.run(f"{CARD}.querySelectorAll('.legend button')[0].click()")
    assert browser.run(f"return getComputedStyle({CARD}.querySelector('[data-s=\"0\"]')).display") == "none"


def test_the_end_of_a_run_brings_its_results(browser: Any, server: Server, run: Path, tmp_path: Path) -> None:
    browser.open(server.address)
    done = make_run(tmp_path / "done", epochs=6)
    for name in ("metrics.jsonl", "timing.jsonl", "analysis.json", "summary.json"):
        (run / name).write_bytes((done / name).read_bytes())
    browser.wait("return document.querySelector('[id^=card-confusion] .plot') !== null")
    browser.wait("return document.querySelector('#tiles').textContent.includes('6 / 6')")


def test_the_page_says_when_the_watch_has_ended(browser: Any, server: Server) -> None:
    browser.open(server.address)
    browser.wait("return document.getElementById('live').textContent === 'live'")
    server.shutdown()
    server.server_close()
    browser.wait("return document.getElementById('live').textContent.includes('ended')")
    assert browser.run("return document.querySelectorAll('.plot').length") > 2
