"""What docs/reproduction.md says has been run is what there are records and results of."""

import json
import statistics
import subprocess

import prose_cases as case
import pytest
import torch
from prose_cases import ROOT, words

from bicovg.methods import build_network
from bicovg.networks import count_parameters
from bicovg.recipes import get_recipe
from bicovg.records import Record, seed_values
from bicovg.report.paper import MAIN


def test_which_records_name_a_commit_that_is_not_there(records: dict[str, Record], text: str) -> None:
    git = ["git", "-C", str(ROOT)]
    ask = [*git, "rev-parse", "--is-shallow-repository", "--show-toplevel"]
    if subprocess.run(ask, capture_output=True, text=True).stdout.split("\n")[:2] != ["false", str(ROOT.resolve())]:
        pytest.skip("no whole history here")
    named = {(name, run["commit"].rstrip("+")) for name, record in records.items() for run in record["runs"]}
    known = {commit: subprocess.run([*git, "cat-file", "-e", commit], capture_output=True) for _, commit in named}
    lost = {name: commit[:7] for name, commit in named if known[commit].returncode}
    assert len(lost) == 12
    assert "Twelve of the records (end to end tuned and its four candidates, the reductions, float32, and" in text
    assert not subprocess.run([*git, "cat-file", "-e", "9c9c568"], capture_output=True).returncode, "is that of"
    assert "(twelve name a commit that this repository does not have" in words("README.md")
    tuned = {name for name in records if name.startswith("cifar100-bp-tune")}
    large = {case.LARGE_BEFORE, case.LARGE_AFTER, case.LARGE_SCALES, case.ONE_CLIP}
    assert lost.keys() == tuned | large | {case.TUNED, case.FINE, case.COARSE, case.FLOAT}
    assert set(lost.values()) == {"06f01ee"}


def test_imagenet100s_recipes_were_exercised_at_full_size(text: str) -> None:
    (path,) = (ROOT / "benchmarks" / "results").glob("imagenet100-cpu-torch*.json")
    found = json.loads(path.read_text())
    rows = {row["recipe"]: row for row in found["rows"]}
    assert rows.keys() == {recipe for recipe in MAIN if recipe.startswith("imagenet100-")}, "the five rows"
    assert (found["training_images"], found["threads"], len(rows)) == (200, 2, 5)
    for recipe, row in rows.items():
        config = get_recipe(recipe)
        with torch.device("meta"):
            net = build_network(config.model, config.data.num_classes, config.data.image_channels)
        assert row["parameters"] == count_parameters(net), "at full width"
        assert (row["batch"], row["precision"], row["epochs"]) == (config.train.batch_size, "bfloat16", 3)
        assert row["exits"] == len(net.exits) == len(row["loss_last_epoch"])
        done = {"train", "predict"} | ({"fuse", "early_exit"} if len(net.exits) > 1 else set())
        assert row["seconds"].keys() == done
        assert statistics.fmean(row["loss_last_epoch"]) < statistics.fmean(row["loss_first_epoch"])
    assert "200 images are packed, the five rows of the paper's main table train for three epochs" in text


RUNS = {  # what the page calls each record, by the row of its table
    "Tiny-ImageNet (VGG-16), 90": {
        case.STRICT: "strict (3)",
        case.WHOLE: "end to end on the same backbone (3)",
        case.LARGE_FAL: "strict + FAL",
        case.HGB: "hgb 4",
        case.LARGE_HELD: "strict with 2 % held out",
    },
    "CIFAR-100 (VGG-8), 400": {
        case.FAL: "strict + FAL (3)",
        case.SMALL_WHOLE: "end to end (3)",
        case.PLAIN: "strict (2)",
        case.GROUPED: "grouped + FAL",
        case.SMALL_HGB: "hgb 4",
        case.HELD: "strict with 2 % held out",
        case.TUNED: "end to end tuned",
    },
    "CIFAR-100, 100": {
        **dict.fromkeys((case.BEFORE, case.MIXED, case.SCALES, case.AFTER), "the ablation's four points"),
        case.ALIGNED: "+ FAL",
        **dict.fromkeys((case.FINE, case.COARSE), "reductions of 4 and 16"),
        case.PAIRS: "hgb 2",
        **dict.fromkeys((case.ONE_LOSS, case.DEEP), "end to end with one loss and with one at every block"),
        case.BARE: "no batch norm",
        case.FLOAT: "float32",
        **{f"cifar100-bp-tune-{name}": "four settings of end to end on held-out images" for name in case.SETTINGS},
    },
    "Tiny-ImageNet, 30": {
        **dict.fromkeys(
            (case.LARGE_BEFORE, case.LARGE_SCALES, case.LARGE_AFTER), "three of the ablation's four points"
        ),
        case.ONE_CLIP: "one clip for all units",
    },
}


def test_what_has_been_run_is_what_there_are_records_of(records: dict[str, Record], text: str) -> None:
    lines = (ROOT / "docs" / "reproduction.md").read_text().splitlines()
    cells = dict([cell.strip() for cell in line.split("|")[1:3]] for line in lines if line.count("|") == 3)
    named = {name for phrases in RUNS.values() for name in phrases}
    assert named == {name for name, one in records.items() if one["data"] != "digits"}
    for row, phrases in RUNS.items():
        assert cells[row].replace(" and end to end on", ", end to end on").replace(";", ",").split(", ") == list(
            dict.fromkeys(phrases.values())
        )
        for name, phrase in phrases.items():
            seeds = len(records[name]["seeds"])
            assert phrase.endswith(f"({seeds})") if seeds > 1 else "(" not in phrase, name
            assert row.endswith(f", {records[name]['epochs']}")
    values = [seed_values(records[name], *keys) for name in named for keys in case.RULES]
    worst = max(max(seeds) - min(seeds) for seeds in values if None not in seeds)
    assert f"Seeds of one setting differ by up to {worst:.1f} points" in text
    many = {name: len(one["seeds"]) for name, one in records.items() if name in named and len(one["seeds"]) > 1}
    assert many == {case.PLAIN: 2, case.STRICT: 3, case.FAL: 3, case.SMALL_WHOLE: 3, case.WHOLE: 3}
    assert "for strict (two on CIFAR-100, three on Tiny-ImageNet) and CIFAR-100's strict + FAL (three)" in text
