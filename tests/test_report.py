"""The report: what the page says, that it asks for nothing and lets nothing in, and the errors of its command."""

import json
import re
import shutil
import socket
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from report_cases import make_run

from bicovg.cli import main
from bicovg.config import from_json
from bicovg.data.digits import load_digits
from bicovg.diagnostics import mean_gain
from bicovg.records import write_record
from bicovg.report.collect import differences, read_run, read_runs
from bicovg.report.page import render_page

EVIL = [
    "<script>window.hacked=1</script>",
    '"><img src=x onerror="window.hacked=2">',
    "'&<b>",
    "</style><svg/onload=1>",
]


class Tags(HTMLParser):
    """Tags with their attributes, and the text between them."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def page_of(*paths: Path) -> str:
    return render_page(read_runs(paths))


def cards(html: str) -> set[str]:
    return {str(a["id"]) for _, a in Tags(html).tags if str(a.get("id", "")).startswith("card-")}


def test_the_page_of_one_run_holds_every_plot(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (run / "early_exit.json").write_text(json.dumps(early_exit()))
    found = cards(page_of(run))
    own = ("accuracy-by-block", "loss-by-block", "final-by-block", "fusion-weights", "early-exit", "confusion")
    for name in (*own, "classes-by-block", "pairs", "wrong"):
        assert f"card-{name}-digits-seed-0" in found
    assert {"card-learning-rate", "card-speed", "card-memory"} <= found


def early_exit() -> dict[str, Any]:
    curve = [{"compute": share, "top1": 50 + 40 * share} for share in (0.1, 0.5, 1.0)]
    rule = {"temperatures": [1.0] * 4, "full": {"top1": 90.0}, "points": [], "curve": curve}
    found = {"calibrated_on": "held-out", "measured_on": "test", "exit_blocks": [0, 1, 2, 3]}
    return {**found, "rules": dict.fromkeys(("mean", "own"), rule)}


def test_the_page_of_three_runs_compares_them(tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path / "a", "digits-per-channel"),
        make_run(tmp_path / "b"),
        make_run(tmp_path / "c", "digits-hgb2"),
    ]
    html = page_of(*runs)
    assert {"card-overview", "card-final-by-block", "card-mean-accuracy", "card-gain-by-block"} <= cards(html)
    text = Tags(html).text
    assert "model.cross_channel" in text
    summaries = [json.loads((run / "summary.json").read_text())["test"]["exits"]["top1"] for run in runs[:2]]
    shallow, deep = mean_gain(*summaries)
    assert f"digits, seed 0: SG {shallow:+.2f}, DG {deep:+.2f}" in text
    assert "digits-hgb2, seed 0: SG" not in text  # other exits: no gain per block


def test_accuracies_on_the_page_are_those_of_the_summary(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    test = json.loads((run / "summary.json").read_text())["test"]
    text = Tags(page_of(run)).text
    for record in (test["last"], test["best_test_chosen"], test["mean"]):
        assert f"{record['top1']:.2f} %" in text
    hovers = [json.loads(str(a["data-hover"])) for _, a in Tags(page_of(run)).tags if "data-hover" in a]
    bars = next(h for h in hovers if [s["name"] for s in h.get("series", [])] == ["top-1"])
    assert bars["series"][0]["y"] == pytest.approx(test["exits"]["top1"], rel=1e-4)


def test_seeds_of_one_configuration_are_pooled(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / f"s{seed}", seed=seed) for seed in range(3)]
    assert "digits, 3 seeds" in Tags(page_of(*runs)).text
    assert "2 seeds" not in Tags(page_of(runs[0], make_run(tmp_path / "other", "digits-bp"))).text


def test_no_text_of_a_run_folder_becomes_markup(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", classes=[*EVIL, *"456789"], about=EVIL[1])
    env = {"command": EVIL[0], "device": EVIL[1], EVIL[2]: EVIL[3]}
    (run / "env.json").write_text(json.dumps(env))
    for html in (page_of(run), page_of(run, make_run(tmp_path / "b", classes=[*EVIL, *"456789"]))):
        tags = Tags(html).tags
        assert [tag for tag, _ in tags].count("script") == 1
        assert not [a for _, a in tags for name in a if name.startswith("on")]
        assert not [a for tag, a in tags if tag == "img" and not str(a["src"]).startswith("data:image/png")]
        assert [tag for tag, _ in tags].count("style") == 1


def test_a_picture_that_is_no_data_uri_cannot_load(tmp_path: Path) -> None:
    """The page's own policy forbids every address but data: and every script but its own."""
    policy = next(str(a["content"]) for _, a in Tags(page_of(make_run(tmp_path / "run"))).tags if "http-equiv" in a)
    assert policy.startswith("default-src 'none'; img-src data:;")
    assert "unsafe-inline" not in policy.split("script-src")[1]
    assert "connect-src" not in policy


def test_the_page_names_no_address(tmp_path: Path) -> None:
    html = page_of(make_run(tmp_path / "run"))
    found = {value for value in re.findall(r"https?://[^\s\"'<]+", html) if not value.startswith("http://www.w3.org/")}
    assert found == set()
    for tag, attributes in Tags(html).tags:
        for name in ("src", "href"):
            value = str(attributes.get(name, "data:"))
            assert value.startswith(("data:", "#")), (tag, value)


def test_a_long_deep_run_makes_a_page_under_8_megabytes(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "tiny-imagenet-bicovg", epochs=400)
    assert len(page_of(run).encode()) < 2_000_000
    hovers = [json.loads(str(a["data-hover"])) for _, a in Tags(page_of(run)).tags if "data-hover" in a]
    curves = next(h for h in hovers if len(h.get("series", [])) == 17)
    assert [len(line["y"]) for line in curves["series"]] == [400] * 17  # nothing is thinned away


def test_a_run_that_goes_on_has_a_page_too(tmp_path: Path) -> None:
    for done in (0, 1, 3):
        text = Tags(page_of(make_run(tmp_path / f"after{done}", done=done))).text
        assert f"{done} / 6" in text
        assert "epochs so far" in text


def test_losses_that_are_not_finite_are_shown_and_not_hidden(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", done=3)
    line = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    line.update(epoch=3, loss=[float("nan"), 1.0, float("inf"), 0.5])
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    hovers = [json.loads(str(a["data-hover"])) for _, a in Tags(page_of(run)).tags if "data-hover" in a]
    losses = next(h for h in hovers if h["series"][0]["y"][-1] == "nan")
    assert losses["series"][2]["y"][-1] == "inf"


def test_every_chart_is_a_well_formed_picture(tmp_path: Path) -> None:
    html = page_of(make_run(tmp_path / "run"), make_run(tmp_path / "b", "digits-hgb2"))
    pictures = re.findall(r"<svg .*?</svg>", html)
    assert len(pictures) > 15
    for picture in pictures:
        ElementTree.fromstring(picture)


def test_runs_of_equal_recipe_and_seed_keep_apart(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "x" / "s0"), make_run(tmp_path / "y" / "s0"), make_run(tmp_path / "z")]
    labels = [run.label for run in read_runs(runs)]
    assert len(set(labels)) == 3
    assert "z" in labels[2]


def test_differences_name_changed_and_missing_fields() -> None:
    one, other = {"a": 1, "b": {"c": 2, "d": 3}}, {"a": 1, "b": {"c": 4}, "e": 5}
    assert differences([one, other]) == {"b.c": [2, 4], "b.d": [3, None], "e": [None, 5]}


def test_a_record_is_read_like_a_run(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", lift=1.0)
    summary = json.loads((run / "summary.json").read_text())
    summary["test"]["diagnostics"] = diagnostics(summary["test"]["exits"]["top1"])
    (run / "summary.json").write_text(json.dumps(summary))
    write_record([run], tmp_path / "records" / "mine")
    recorded = read_run(tmp_path / "records" / "mine" / "s0")
    assert recorded.recorded
    assert recorded.summary is not None
    assert recorded.summary["test"]["mean"] == summary["test"]["mean"]
    assert recorded.label == "mine, seed 0"
    assert main(["report", str(recorded.path), "--out", str(tmp_path / "page.html")]) == 0


def test_a_record_of_a_run_without_its_size_and_duration_has_a_page(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    summary = json.loads((run / "summary.json").read_text())
    summary["test"].pop("diagnostics")
    (run / "summary.json").write_text(json.dumps({**summary, "parameters": None, "wall_seconds": None}))
    write_record([run], tmp_path / "mine")
    for runs in ([tmp_path / "mine" / "s0"], [tmp_path / "mine" / "s0", make_run(tmp_path / "other", seed=1)]):
        assert "card-final-by-block" in page_of(*runs)


@pytest.mark.parametrize("loss", [5e-324, 0.0, 1e99, float("nan"), float("inf")])
def test_any_loss_a_run_can_have_is_drawn(loss: float, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", done=2)
    line = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({**line, "epoch": 2, "loss": [loss, *line["loss"][1:]]}) + "\n")
    assert "card-loss-by-block-digits-seed-0" in cards(page_of(run))


def diagnostics(top1: list[float]) -> dict[str, float]:
    from bicovg.diagnostics import decline_area, tail_retention

    return {"DA": decline_area(top1), "TR": tail_retention(top1)}


def test_training_leaves_a_page_with_its_own_mistakes(finished_run: Path) -> None:
    assert (finished_run / "report.html").is_file()
    analysis = json.loads((finished_run / "analysis.json").read_text())
    config = from_json((finished_run / "config.json").read_text())
    assert sum(map(sum, analysis["confusion"])) == 359  # every test image of the digits, once
    right = sum(analysis["confusion"][k][k] for k in range(config.data.num_classes))
    mean = json.loads((finished_run / "summary.json").read_text())["test"]["mean"]["top1"]
    assert 100 * right / 359 == pytest.approx(mean)
    assert len(load_digits()[0]) == 1797


def test_the_command_makes_a_missing_analysis_anew(finished_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "copy"
    shutil.copytree(finished_run, run)
    first = (run / "analysis.json").read_text()
    (run / "analysis.json").unlink()
    assert main(["report", str(run), "--device", "cpu"]) == 0
    assert (run / "analysis.json").read_text() == first


def refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(words) == 2
    shown = capsys.readouterr()
    (sentence,) = shown.err.strip().splitlines()
    assert shown.out == ""
    return sentence


def test_wrong_input_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run")
    unfinished = make_run(tmp_path / "unfinished", done=2)
    (tmp_path / "empty").mkdir()
    file = tmp_path / "file"
    file.write_text("")
    assert "does not exist" in refused(["report", str(tmp_path / "nowhere")], capsys)
    assert "not a run folder" in refused(["report", str(tmp_path / "empty")], capsys)
    assert "bicovg watch" in refused(["report", str(unfinished)], capsys)
    assert "twice" in refused(["report", str(run), str(run)], capsys)
    assert "is a folder" in refused(["report", str(run), "--out", "."], capsys)
    assert "needs a run folder" in refused(["report"], capsys)
    assert "cannot write" in refused(["report", str(run), "--out", str(file / "page.html")], capsys)
    assert "cannot write" in refused(["report", str(run), "--figures", str(file / "figures")], capsys)
    assert "'gif'" in refused(["report", str(run), "--figures", str(tmp_path / "f"), "--format", "gif"], capsys)


@pytest.mark.parametrize("name", ["config.json", "summary.json", "metrics.jsonl", "analysis.json", "timing.jsonl"])
@pytest.mark.parametrize("content", ["{\n", "[1, 2]\n", "{}\n"])
def test_damaged_files_are_one_sentence(
    name: str, content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run")
    (run / name).write_text(content)
    assert name in refused(["report", str(run)], capsys)


def test_a_run_without_its_images_says_how_to_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run", "cifar100-bicovg")
    (run / "analysis.json").unlink()
    sentence = refused(["report", str(run), "--data-root", str(tmp_path / "no-data"), "--device", "cpu"], capsys)
    assert "--no-images" in sentence
    assert main(["report", str(run), "--no-images"]) == 0
    assert "card-confusion" not in (run / "report.html").read_text()


def test_making_a_page_opens_no_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    page_of(make_run(tmp_path / "run"))
