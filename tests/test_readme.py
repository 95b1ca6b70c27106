"""The README: its example and its commands run as printed, its table and its tree are true."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import fmean, stdev

import pytest
from PIL import Image

from bicovg.cli import main
from bicovg.data.digits import load_digits
from bicovg.diagnostics import mean_gain
from bicovg.recipes import RECIPES, get_recipe

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
QUICK = ["--train.epochs", "1", "--model.channels", "8,8,8,8"]  # the default recipe takes half a minute
FAMILIES = ("cifar100", "tiny-imagenet", "imagenet100")


def blocks(language: str) -> list[str]:
    """The fenced blocks of a language, as printed."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


def table_rows() -> dict[str, list[str]]:
    """The recipe table: cells by row name."""
    lines = README.split("| row |")[1].split("\n\n")[0].splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0].strip("`"): row[1:] for row in rows}


def test_library_example_is_short_and_learns_as_printed(tmp_path: Path) -> None:
    (example,) = blocks("python")
    assert len([line for line in example.splitlines() if line.strip()]) <= 20
    done = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[-1]) > 0.85


def test_commands_run_in_the_order_they_are_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("BICOVG_DATA", raising=False)
    Image.fromarray(load_digits()[0][0, :, :, 0]).save("picture.png")
    (script,) = blocks("sh")
    lines = [shlex.split(line, comments=True) for line in script.splitlines() if line.strip()]
    assert len(lines) >= 8
    for program, *words in lines:
        assert program == "bicovg"
        new_run = words[0] == "train" and "--resume" not in words
        assert main([*words, *(QUICK if new_run else [])]) == 0, words
    assert "SG" in capsys.readouterr().out
    assert (tmp_path / "report.html").exists()


def test_make_commands_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    named = set(re.findall(r"(?:^|`)make ([a-z-]+)", README, re.MULTILINE))
    assert {"demo", "test"} <= named <= targets


def test_make_gpu_runs_every_test_that_needs_a_gpu() -> None:
    makefile = (ROOT / "Makefile").read_text()
    files = re.search(r"^GPU := (.*)", makefile, re.MULTILINE)
    assert files is not None
    whole, found = set(files[1].split()), 0
    needs = r"^(?:@NEEDS_GPU|@needs_gpu|@pytest\.mark\.skipif\(not torch\.cuda.*)\n(?:@.*\n|[ )].*\n)*def (\w+)"
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        name = str(path.relative_to(ROOT / "tests").with_suffix(""))
        for test in re.findall(needs, path.read_text(), re.MULTILINE):
            found += 1
            alone = f"{name}.py::{test}" in makefile or re.search(rf" {name}\.py$", makefile, re.MULTILINE)
            assert name in whole or alone, f"{name}::{test}"
    assert found >= 9


def test_recipe_table_agrees_with_the_recipes() -> None:
    rows = table_rows()
    shown = {
        f"{family}-{row}"
        for row, cells in rows.items()
        for family, cell in zip(FAMILIES, cells[2:], strict=True)
        if cell != "-"
    }
    shown |= set(re.findall(r"`(digits[a-z0-9-]*)`", README))
    assert shown == set(RECIPES)
    for row, (_, scope, *cells) in rows.items():
        for family, cell in zip(FAMILIES, cells, strict=True):
            if cell == "-":
                continue
            config = get_recipe(f"{family}-{row}")
            assert config.model.scope == scope, config.recipe
            source = config.about.split(":")[0].replace(" table", "")
            assert cell == source, f"{config.recipe}: the README says {cell!r}, the recipe {source!r}"


def test_measured_figures_of_the_digits_are_those_of_their_records() -> None:
    """The table is made from records, which another test sees to; here it is computed without that code."""
    lines = README.split("<!-- table: digits -->")[1].split("<!-- end of table -->")[0].splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if "+-" in line]
    curves = {}
    for name, *cells in rows:
        runs = json.loads((ROOT / "records" / name / "record.json").read_text())["runs"]
        assert [run["seed"] for run in runs] == [0, 1, 2, 3, 4]
        columns = [*zip(*(run["exits"]["top1"] for run in runs), strict=True)]
        columns += [[run["mean"]["top1"] for run in runs], [run["fusion"]["train"]["top1"] for run in runs]]
        assert cells == [f"{fmean(column):.2f} +- {stdev(column):.2f}" for column in columns]
        curves[name] = [fmean(column) for column in columns[:4]]
    assert set(curves) == {"digits", "digits-per-channel"}
    shallow, deep = mean_gain(curves["digits-per-channel"], curves["digits"])
    assert f"SG {shallow:+.2f}, DG {deep:+.2f} points" in README


def test_tree_names_only_what_exists() -> None:
    tree = README.split("## What is where\n```\n")[1].split("```")[0]
    listed = [
        f"bicovg/{name}" if line.startswith(" ") else line.split()[0]
        for line in tree.splitlines()
        for name in re.findall(r"[a-z_0-9]+(?:\.py|/)(?=[\s:])", line)
    ]
    assert len(listed) > 20
    for path in listed:
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("path", ["README.md", "CONTRIBUTING.md"])
def test_links_lead_somewhere(path: str) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", (ROOT / path).read_text()):
        assert (ROOT / target).exists(), target


def test_first_screen_says_what_it_is_and_how_to_start() -> None:
    screen = "\n".join(README.splitlines()[:40])
    assert "without backpropagation" in screen
    assert "make demo" in screen
    assert "make test" in screen


def test_no_file_names_a_package_registry() -> None:
    git = shutil.which("git")
    if git is None or not (ROOT / ".git").exists():
        pytest.skip("needs a git checkout to list the tracked files")
    names = subprocess.run([git, "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    hosts = [f"{one}{two}.org".encode() for one, two in (("py", "pi"), ("python", "hosted"))]  # not written out here
    for name in filter(None, names):
        path = ROOT / name
        if path.is_file() and path.stat().st_size < 1_000_000:
            content = path.read_bytes()
            assert not any(host in content for host in hosts), name
