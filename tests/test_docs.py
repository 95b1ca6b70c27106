"""The docs: every code block runs or is a command that exists, every link leads somewhere, the site builds strictly."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

import bicovg
from bicovg.cli import build_parser, main, suggest_flags
from bicovg.data.digits import load_digits

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(path.name for path in DOCS.glob("*.md"))
# what a reader runs as printed takes longer than a test may
QUICK = ["--train.epochs", "1", "--train.batch_size", "256"]
SMALL = ["--model.channels", "8,8,8,8"]
BLOCK = re.compile(r"^```([a-z]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def blocks(page: str) -> list[tuple[str, str]]:
    """(language, code) of every fenced block of a page."""
    return BLOCK.findall((DOCS / page).read_text())


def commands(code: str) -> list[list[str]]:
    """The words of every line that begins with ``bicovg``; an explanation two spaces further on is left out."""
    lines = [re.split(r"\s{2,}|\s#", line.strip())[0] for line in code.splitlines()]
    found = [re.sub(r"^(srun )?", "", line) for line in lines if re.match(r"(srun )?bicovg ", line)]
    return [shlex.split(line)[1:] for line in found]


def run_line(line: str) -> None:
    """One line of a shell block, in this process; what needs another machine or the network is only checked."""
    program, *words = shlex.split(line, comments=True)
    if program == "bicovg":
        new_run = words[0] == "train" and "--resume" not in words
        small = SMALL if new_run and "--model.channels" not in words else []
        assert main([*words, *(small + QUICK if new_run else [])]) == 0, line
    elif program == "make":
        assert re.search(rf"^{words[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), line
    elif program == "python":
        done = subprocess.run([sys.executable, str(ROOT / words[0]), *words[1:]], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    else:
        raise AssertionError(f"no test runs {line!r}: write it as text")


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what the pages take for granted: a few pictures, and a small stand-in for CIFAR-100."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("BICOVG_DATA", raising=False)
    (tmp_path / "pictures").mkdir()
    for index, pixels in enumerate(load_digits()[0][:3, :, :, 0]):
        Image.fromarray(pixels).save(tmp_path / "pictures" / f"{index}.png")
    return tmp_path


def pack_stand_in(folder: Path) -> None:
    """Two images as the packed data set ``data/cifar100``."""
    from bicovg.data.sources import open_source
    from bicovg.data.store import pack

    for split in ("train", "test"):
        for name in ("apple", "bear"):
            place = folder / "raw" / split / name
            place.mkdir(parents=True)
            Image.new("RGB", (32, 32), (len(name) * 20, 5, 9)).save(place / "0.png")
    pack(open_source(folder / "raw"), folder / "data", "cifar100", size=32)


@pytest.mark.parametrize("page", PAGES)
def test_every_code_block_runs(page: str, workplace: Path) -> None:
    namespace: dict[str, object] = {"__name__": "__main__"}
    if page == "data.md":
        pack_stand_in(workplace)
    for language, code in blocks(page):
        if language == "python":
            exec(compile(code, f"{page}", "exec"), namespace)
        elif language == "sh" and code.startswith("#!"):
            script = workplace / "script"
            script.write_text(code)
            subprocess.run(["sh", "-n", str(script)], check=True)
        elif language == "sh":
            for line in code.splitlines():
                if line.strip() and not line.strip().startswith("#"):
                    run_line(line)
        else:
            assert language in ("", "text"), f"{page} has a block in {language}, which no test runs"


@pytest.mark.parametrize("page", PAGES)
def test_every_command_that_is_only_shown_exists(page: str) -> None:
    parser = build_parser()
    inline = [f"bicovg {words}" for words in re.findall(r"`bicovg ([a-z][^`]*)`", (DOCS / page).read_text())]
    shown = [code for language, code in blocks(page) if language in ("", "text") or code.startswith("#!")]
    for words in commands("\n".join([*shown, *inline])):
        suggest_flags(parser, words)
        choices = next(a.choices for a in parser._actions if a.dest == "command")
        assert words[0] in choices, words


def headings(text: str) -> set[str]:
    """Anchors of a page's headings, as the site makes them."""
    found = re.findall(r"^#+ (.+)$", re.sub(BLOCK, "", text), re.MULTILINE)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower()) for title in found}


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", re.sub(BLOCK, "", (DOCS / page).read_text())):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        place = DOCS / (path or page)
        assert place.is_file(), f"{page}: {target}"
        assert not anchor or anchor in headings(place.read_text()), f"{page}: {target}"


def test_the_api_page_has_every_public_name() -> None:
    text = (DOCS / "api.md").read_text()
    assert set(re.findall(r"^## (\w+)$", text, re.MULTILINE)) == set(bicovg.__all__), "run make docs"


def test_every_page_is_in_the_table_of_contents_or_is_said_not_to_be() -> None:
    listed = set(re.findall(r"([\w-]+\.md)", (ROOT / "mkdocs.yml").read_text()))
    assert listed <= set(PAGES)
    required = {"method", "quickstart", "recipes", "data", "performance", "reliability", "goodness", "faq", "using"}
    assert {f"{name}.md" for name in required} <= listed


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="the site needs mkdocs-material")
    words = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "-f",
        str(ROOT / "mkdocs.yml"),
        "-d",
        str(tmp_path),
    ]
    done = subprocess.run(words, capture_output=True, text=True, env={"NO_MKDOCS_2_WARNING": "1", "PATH": "/usr/bin"})
    assert done.returncode == 0, done.stdout + done.stderr
    page = (tmp_path / "index.html").read_text()
    outside = re.findall(r"<(?:script|img|link rel=.?stylesheet)[^>]*https?://[^>]*>", page)
    assert outside == []  # nothing is fetched from elsewhere


def test_reports_shown_in_the_docs_are_those_that_are_printed() -> None:
    page = (DOCS / "own-network.md").read_text()
    namespace: dict[str, object] = {}
    exec(blocks("own-network.md")[0][1].replace("print(", "shown = ("), namespace)
    assert str(namespace["shown"]) in page
