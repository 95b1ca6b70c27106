"""The command line: bad input is one sentence, exit code 2 and nothing written; help needs no torch."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from archives import encode, picture

from bicovg.cli import build_parser, load_handler, main
from bicovg.recipes import RECIPES

# words after `bicovg train`, and what the sentence must name: what was wrong, its value, the repair
BAD_TRAIN = {
    "unknown recipe": ("digts", ["'digts'", "did you mean digits?"]),
    "unknown field": ("digits --optim.lrr 1", ["--optim.lrr", "did you mean --optim.lr?"]),
    "unknown flag": ("digits --rseume x", ["--rseume", "did you mean --resume?"]),
    "scale larger than the map": (
        "digits --model.scales [[2,4],[2,16],[1,2],[1,2]]",
        ["block 1", "scale 16", "8x8 map"],
    ),
    "scale larger than the pooled map": (
        "digits --model.pools 0,1,2 --model.scales [[2,4],[2,4],[1,2],[1,2]]",
        ["block 3", "scale 2", "1x1 map"],
    ),
    "channels not divisible by r": (
        "digits --model.channels 32,64,60,128",
        ["block 2", "60 channels", "reduction 8"],
    ),
    "pool on a map of one pixel": (
        "digits --model.pools 0,1,2,3 --model.multi_scale false",
        ["block 3", "RMSPool", "1x1"],
    ),
    "m that does not divide L": (
        "digits --model.scope hgb --model.group_size 3",
        ["group_size 3", "4 blocks", "divisor of 4"],
    ),
    "groups that do not add up": ("digits --model.scope grouped --model.groups 1,2", ["groups (1, 2)", "add up to 4"]),
    "global clip interleaved": (
        "digits --train.clip_norm 1 --train.clip_scope global",
        ["bicovg: a global clip", "cannot be interleaved", "summed"],
    ),
    "global clip without a norm": (
        "digits --train.clip_scope global --train.schedule summed",
        ["bicovg: a global clip scope", "clip norm"],
    ),
    "float16": ("digits --train.precision float16", ["bicovg: precision float16", "256", "bfloat16"]),
    "missing data set": ("cifar100-bicovg --data.root nowhere", ["'cifar100'", "bicovg data pack cifar100 --from"]),
    "K below the labels": ("digits --data.num_classes 7", ["--data.num_classes 7", "10 classes", "use 10"]),
    "K above the labels": ("digits --data.num_classes 11", ["--data.num_classes 11", "10 classes"]),
    "image size of other data": ("digits --data.image_size 16", ["--data.image_size 16", "8x8"]),
    "channels of other data": ("digits --data.image_channels 3", ["--data.image_channels", "1 channels"]),
    "normalisation of other data": ("digits --data.normalise imagenet", ["1 channels", "normalisation has 3"]),
    "batch larger than the data": ("digits --train.batch_size 5000", ["5000", "1438"]),
    "everything held out": ("digits --data.holdout 1", ["--data.holdout 1.0", "below 1"]),
    "unknown scope": ("digits --model.scope strickt", ["strickt", "did you mean strict?"]),
    "unknown method": ("digits --model.method bicov", ["'bicov'", "did you mean bicovg?"]),
    "unknown optimizer": ("digits --optim.name adam", ["adam", "adamw"]),
    "unknown engine": ("digits --train.engine quick", ["quick", "eager"]),
    "unknown device": ("digits --train.device tpu", ["tpu", "cpu"]),
    "negative rate": ("digits --optim.lr -1", ["--optim.lr -1.0", "at least 0"]),
    "rate that is no number": ("digits --optim.lr nan", ["--optim.lr nan"]),
    "word for a number": ("digits --optim.lr fast", ["--optim.lr 'fast'", "not a number"]),
    "no epochs": ("digits --train.epochs 0", ["--train.epochs 0", "at least 1"]),
    "width too small": ("digits --model.width 0.01", ["channels (0, 0, 0, 1)"]),
    "dropout of everything": ("digits --model.dropout 1", ["--model.dropout 1.0", "below 1"]),
    "pool that is no block": ("digits --model.pools 9", ["pools (9,)", "between 0 and 3"]),
    "one scale tuple missing": ("digits --model.channels 8,8,8,8,8", ["4 scale tuples", "5 blocks"]),
    "seconds that never come": ("digits --max-seconds 0", ["--max-seconds", "above 0"]),
    "a seed twice": ("digits --seeds 1 1", ["--seeds 1 1", "twice"]),
    "a seed that is none": ("digits --seeds 1 -2", ["'-2'", "whole number"]),
    "a seed too large": (f"digits --seed {2**70}", ["--seed", "below"]),
    "resume and a recipe": ("digits --resume r", ["--resume", "give no recipe"]),
    "resume of nothing": ("--resume nowhere", ["nowhere is not a run folder"]),
    "resume with another rate": ("--resume nowhere --optim.lr 1", ["--optim.lr cannot change on --resume"]),
    "a second recipe": ("digits digits-bp", ["'digits-bp'"]),
    "flag without its value": ("digits --out", ["--out"]),
    "two crops at once": (
        "digits --data.augment.crop_pad 2 --data.augment.resized_crop 8",
        ["--data.augment.crop_pad 2 and --data.augment.resized_crop 8", "set one of them to 0"],
    ),
    "padding beyond the image": (
        "digits --data.augment.crop_pad 100000",
        ["--data.augment.crop_pad 100000", "--data.image_size 8", "at most 8"],
    ),
    "batch norm over one value": (
        "digits --model.channels 16,16,16,16 --model.pools 0,1,2 --model.scales [[1],[1],[1],[1]] --train.batch_size 1",
        ["block 3", "1x1 map", "--train.batch_size", "--model.batch_norm false"],
    ),
    "more threads than any machine has": ("digits --train.threads 100000", ["--train.threads 100000", "at most 1024"]),
    "brackets without end": (f"digits --model.scales {'[' * 100_000}", ["--model.scales '[[[", "is not a list"]),
    "synthetic images beyond memory": (
        "digits --data.name synthetic --data.num_classes 100000 --data.image_size 224 --model.width 0.25",
        ["100000 classes", "--data.num_classes", "--data.image_size"],
    ),
}
BAD_COMMANDS = {
    "unknown command": ("trian", ["'trian'", "did you mean train?"]),
    "eval of nothing": ("eval nowhere", ["nowhere is not a run folder"]),
    "fuse of nothing": ("fuse nowhere", ["nowhere is not a run folder"]),
    "eval on an unknown device": ("eval nowhere --device foo", ["--device", "'foo'", "cpu", "cuda"]),
    "predict on an unknown device": ("predict nowhere image.png --device foo", ["--device", "'foo'", "cpu", "cuda"]),
    "unknown flag of data pack": ("data pack x --from y --formt z", ["--formt", "did you mean --format?"]),
    "unknown command of data": ("data pakc x", ["'pakc'", "did you mean pack?"]),
    "fuse on unknown images": ("fuse nowhere --on test", ["'test'", "heldout"]),
    "predict with nothing": ("predict nowhere image.png", ["nowhere is not a run folder"]),
    "predict nothing": ("predict nowhere", ["IMAGE"]),
    "compare nothing": ("compare nowhere", ["nowhere is not a run folder"]),
}


def assert_refused(words: list[str], needles: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code = main(words)
    shown = capsys.readouterr()
    assert code == 2, shown.out + shown.err
    (sentence,) = shown.err.strip().splitlines()  # one line, no traceback
    assert sentence.startswith("bicovg: ")
    for needle in needles:
        assert needle in sentence, sentence
    assert "--train." not in sentence or any("--train." in word for word in (*words, *needles))
    assert len(sentence) < 500
    assert shown.out == ""


@pytest.mark.parametrize("case", BAD_TRAIN)
def test_bad_training_input_is_one_sentence_and_nothing_is_written(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words, needles = BAD_TRAIN[case]
    assert_refused(["train", *words.split()], needles, capsys)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("case", BAD_COMMANDS)
def test_bad_words_are_one_sentence(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words, needles = BAD_COMMANDS[case]
    assert_refused(words.split(), needles, capsys)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("seeds", [[], ["--seeds", "0", "1"]])
def test_an_out_folder_that_exists_is_left_as_it_is(
    seeds: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("keep")
    assert_refused(["train", "digits", "--out", str(tmp_path / "out"), *seeds], ["out exists", "another"], capsys)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine.txt"]


def test_damaged_run_folders_are_one_sentence(
    finished_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished_run, run)
    (run / "summary.json").write_text("{")
    assert_refused(["compare", str(run)], ["summary.json is not valid JSON", "bicovg eval"], capsys)
    (run / "summary.json").unlink()
    assert_refused(["compare", str(run)], ["has no summary.json", "--resume"], capsys)
    config = json.loads((run / "config.json").read_text())
    config["model"]["chanels"] = config["model"].pop("channels")
    (run / "config.json").write_text(json.dumps(config))
    assert_refused(["eval", str(run)], ["unknown field model.chanels", "did you mean channels?"], capsys)


def test_fuse_of_what_cannot_be_fused_is_refused(
    finished_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "bp"
    small = ["--model.channels", "8,8,8,8", "--train.epochs", "1"]
    assert main(["train", "digits-bp", *small, "--out", str(run)]) == 0
    capsys.readouterr()
    assert_refused(["fuse", str(run)], ["single exit"], capsys)
    (tmp_path / "gray.png").write_bytes(encode(picture(0, 8)))
    ask = ["predict", str(run), str(tmp_path / "gray.png")]
    assert_refused([*ask, "--head", "fused"], ["single exit", "use --head last"], capsys)
    assert_refused([*ask, "--early-exit", "0.9"], ["single exit", "leave out --early-exit"], capsys)
    assert main([*ask, "--head", "last"]) == 0
    capsys.readouterr()
    strict = tmp_path / "strict"
    assert main(["train", "digits", *small, "--out", str(strict)]) == 0
    capsys.readouterr()
    assert_refused(["fuse", str(strict), "--on", "heldout"], ["held nothing out", "--data.holdout"], capsys)


def run_apart(*words: str) -> tuple[float, str]:
    """CPU seconds and output of a process of its own, the best of three: a busy machine does not change them."""
    seconds = []
    for _ in range(3):
        before = os.times()
        done = subprocess.run([sys.executable, "-m", "bicovg", *words], capture_output=True, text=True, check=True)
        after = os.times()
        seconds.append(after.children_user - before.children_user + after.children_system - before.children_system)
    return min(seconds), done.stdout


@pytest.mark.parametrize("words", [["--help"], ["recipes"], ["train", "--help"]])
def test_help_and_recipes_answer_in_a_blink(words: list[str]) -> None:
    seconds, text = run_apart(*words)
    assert 0 < seconds < 0.5
    assert "train" in text or "digits" in text


def test_help_and_recipes_import_no_torch() -> None:
    code = (
        "import sys\n"
        "from bicovg.cli import main\n"
        "codes = [main(['recipes']), main([]), main(['train', 'digts']), main(['train', '--optim.lrr', '1'])]\n"
        "assert codes == [0, 0, 2, 2], codes\n"
        "try:\n"
        "    main(['train', '--help'])\n"
        "except SystemExit as left:\n"
        "    assert left.code == 0\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_recipes_lists_every_recipe_with_its_scope(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(RECIPES)
    for line in lines:
        assert RECIPES[line.split()[0]]().model.scope in line


def test_every_field_of_the_config_is_a_documented_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["train", "--help"])
    assert left.value.code == 0
    text = capsys.readouterr().out
    for flag in ("--optim.lr", "--model.channels", "--data.augment.flip", "--train.clip_norm", "--seed", "--resume"):
        assert flag in text


def test_an_unexpected_bug_shows_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("a bug")

    monkeypatch.setitem(RECIPES, "digits", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        main(["train", "digits"])


def test_every_command_has_its_function() -> None:
    (commands,) = [action for action in build_parser()._actions if isinstance(action.choices, dict)]
    for name in commands.choices:
        assert name == "recipes" or callable(load_handler(name))
