"""``bicovg data pack | verify | list`` as a user meets them, and what ``bicovg train`` says without its data."""

import json
import os
import pty
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from archives import encode, picture, write_cifar_binary, write_classes, write_parquet, write_tar, write_tiny_imagenet
from archives import labelled as labelled_rows

from bicovg.cli import main
from bicovg.data import command
from bicovg.data.known import IMAGENET100
from bicovg.data.sources import read_class_list
from bicovg.data.store import PackedStore

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def _work_in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BICOVG_DATA", raising=False)
    monkeypatch.chdir(tmp_path)


def run(capsys: pytest.CaptureFixture[str], line: str) -> tuple[int, str, str]:
    code = main(shlex.split(line))
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_pack_list_and_verify(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(capsys, "data list")[1] == "no data sets in data: run `bicovg data pack NAME --from PATH`\n"
    write_classes(Path("photos"), ["cat", "dog"], 10)
    code, out, _ = run(capsys, "data pack pets --from photos --size 16 --test-share 0.3")
    described = "pets: train 14, test 6 images, 2 classes, 16x16, 0.0 MB\n"
    assert (code, out.splitlines(keepends=True)[0]) == (0, described)
    assert run(capsys, "data list")[:2] == (0, described)
    assert run(capsys, "data verify pets")[:2] == (0, "pets: every byte is as packed\n")
    monkeypatch.setenv("BICOVG_DATA", "elsewhere")
    assert run(capsys, "data pack pets --from photos")[0] == 0
    assert PackedStore.open(Path("elsewhere"), "pets").size is None
    assert run(capsys, "data pack pets --from photos --root data")[0] == 2
    assert run(capsys, "data pack pets --from photos --root data --short-side 16 --force --jobs 2")[0] == 0
    assert PackedStore.open(Path("data"), "pets").kind == "variable"


@pytest.mark.parametrize(
    ("fit", "recipe"),
    [
        ("--size 16", "digits"),
        ("--size 32", "cifar100"),
        ("--size 64", "tiny-imagenet"),
        ("--short-side 20", "imagenet100"),
    ],
)
def test_the_command_printed_after_packing_ones_own_images_trains_on_them(
    fit: str, recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_classes(Path("photos"), ["cat", "dog"], 10)
    _, out, _ = run(capsys, f"data pack pets --from photos {fit}")
    line = out.splitlines()[-1].removeprefix("train on it: bicovg ")
    assert line.startswith(f"train {recipe}")
    small = "--train.epochs 1 --train.device cpu"
    if recipe != "digits":
        small += " --model.channels 8 --model.pools [] --model.scales [[1,2]] --model.groups 1 --model.stem 4"
    if recipe == "imagenet100":
        small += " --data.image_size 16 --data.augment.resized_crop 16 --data.resize 20"
    code, _, error = run(capsys, f"{line} {small} --out run")
    assert code == 0, error


def test_images_that_are_not_square_get_a_command_that_trains(capsys: pytest.CaptureFixture[str]) -> None:
    for side, recipe in ((20, "digits"), (40, "cifar100")):
        for number, name in enumerate(("cat", "dog")):
            folder = Path(f"photos{side}") / name
            folder.mkdir(parents=True)
            for i in range(10):
                (folder / f"{i}.png").write_bytes(encode(picture(100 * number + i, side, 2 * side)))
        _, out, _ = run(capsys, f"data pack pets{side} --from photos{side}")
        line = out.splitlines()[-1].removeprefix("train on it: bicovg ")
        assert line.startswith(f"train {recipe}")
        small = "--train.epochs 1 --model.channels 8 --model.pools [] --model.scales [[1,2]] --model.groups 1"
        code, _, error = run(capsys, f"{line} {small} --model.stem 4 --train.device cpu --out run{side}")
        assert code == 0, error


def test_folders_of_a_tree_that_are_not_used_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("train", "val", "Test", "notes"):
        write_classes(Path("photos") / name, ["cat", "dog"], 4)
    code, out, error = run(capsys, "data pack pets --from photos --size 16")
    assert (code, out.split(",")[0]) == (0, "pets: train 8")
    assert error == "not used: the folders Test, notes of photos\n"
    assert "not used" not in run(capsys, "data pack pets --from photos/train --size 16 --force")[2]


def test_one_class_alone_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    write_classes(Path("photos"), ["cat"], 4)
    code, _, error = run(capsys, "data pack pets --from photos")
    assert (code, error) == (2, "bicovg: photos has 1 classes ('cat'): give a folder with two or more of them\n")
    write_classes(Path("photos"), ["dog"], 4)
    Path("list.txt").write_text("cat\n")
    assert "list.txt names one class" in run(capsys, "data pack pets --from photos --classes list.txt")[2]


def test_a_data_set_packed_anew_is_not_taken_for_the_one_of_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    sets = {"right": (["cat", "dog"], 0), "other": (["cat", "dog"], 5000), "exchanged": (["dog", "cat"], 0)}
    for name, (classes, first) in {**sets, "renamed": (["cat", "wolf"], 0)}.items():
        write_classes(Path(name), classes, 10, first=first)
    pack = "data pack pets --size 16 --force --from"
    _, out, _ = run(capsys, f"{pack} right")
    line = out.splitlines()[-1].removeprefix("train on it: bicovg ")
    small = "--train.epochs 2 --model.channels 8 --model.pools [] --model.scales [[1,2]] --model.groups 1"
    assert run(capsys, f"{line} {small} --train.device cpu --out run")[0] == 0
    assert run(capsys, f"{line} {small} --train.device cpu --seeds 3 --out runs")[0] == 0
    noted = Path("run/data.json").read_text()
    said = "pets holds other images or labels than those of run: it was packed anew, or elsewhere"
    for other in ("other", "exchanged"):
        run(capsys, f"{pack} {other}")
        for words in ("eval run", "fuse run", "eval run --early-exit", "train --resume run"):
            code, _, error = run(capsys, words)
            assert code == 2, words
            assert said in error, words
        assert Path("run/data.json").read_text() == noted
        code, _, error = run(capsys, f"{line} {small} --train.device cpu --seeds 3 7 --out runs")
        assert (code, Path("runs/s7").exists()) == (2, False)
        assert said.replace("of run", "of runs/s3") in error
    run(capsys, f"{pack} renamed")  # the same images and labels: a fingerprint says so
    assert run(capsys, "eval run")[0] == 0
    old = json.loads(noted)
    del old["fingerprint"]  # as older runs noted it: their classes are compared, names with names
    Path("run/data.json").write_text(json.dumps(old))
    assert said in run(capsys, "eval run")[2]
    Path("run/data.json").write_text(json.dumps(old | {"classes": ["0", "1"]}))
    assert run(capsys, "eval run")[0] == 0
    run(capsys, f"{pack} right --root elsewhere")  # the same images, packed again in another place
    Path("run/data.json").write_text(noted)
    assert run(capsys, "eval run --data-root elsewhere")[0] == 0
    Path("run/data.json").write_text("damaged")
    assert run(capsys, "train --resume run --data.root elsewhere")[0] == 0
    assert Path("run/data.json").read_text() == noted


def test_verify_and_list_report_damage(capsys: pytest.CaptureFixture[str]) -> None:
    write_classes(Path("photos"), ["cat", "dog"], 10)
    run(capsys, "data pack pets --from photos --size 16")
    with Path("data/pets/train.images").open("r+b") as stream:
        stream.write(b"?")
    assert run(capsys, "data verify pets")[:2] == (1, "pets: train.images has changed since it was packed\n")
    Path("data/pets/test.labels").unlink()
    Path("data/pets.partial-1").mkdir()
    Path("data/notes").mkdir()
    code, out, _ = run(capsys, "data list")
    assert code == 0
    assert "'pets' in data is damaged, test.labels is missing" in out
    assert "pets.partial-1: left by an interrupted packing" in out
    assert "notes" not in out
    code, out, _ = run(capsys, "data pack pets --from photos --force")
    assert out.startswith("removed pets.partial-1, left by an interrupted packing\npets: train 16, test 4 images")
    assert not Path("data/pets.partial-1").exists()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("data", "arguments are required: COMMAND"),
        ("data wash", "unknown command 'wash' .`bicovg data --help`"),
        ("data pack", "arguments are required: NAME, --from"),
        ("data pack x --from photos --colour red", "unknown field or flag --colour"),
        ("data pack x --from nowhere", "nowhere does not exist: give the path of"),
        ("data pack x --from photos --size big", "argument --size: invalid int value: 'big'"),
        ("data pack x --from photos --size 0", "size 0 must lie between 1 and 4096"),
        ("data pack x --from photos --size 8 --short-side 8", "not allowed with argument --size"),
        ("data pack x --from photos --jobs 0", "--jobs 0 must be at least 1"),
        ("data pack x --from photos --max-rejected 2", "--max-rejected 2.0 must lie between 0 and 1"),
        ("data pack x --from photos --max-rejected nan", "--max-rejected nan must lie between 0 and 1"),
        ("data pack x --from photos --test-share 1", "test share 1.0 must lie between 0 and 1"),
        ("data pack x --from photos --format tar", "unknown format 'tar'"),
        ("data pack x --from photos --classes none.txt", "cannot read none.txt as a text file"),
        ("data pack digits --from photos", "data set name 'digits' is that of a built-in set: choose another"),
        ("data pack synthetic --from photos", "data set name 'synthetic' is that of a built-in set: choose another"),
        ("data pack ../x --from photos", "data set name '../x' is not usable"),
        ("data pack imagenet100 --from photos", "100 of the 100 classes in .*imagenet100.txt have no folder in photos"),
        ("data verify x", "data set 'x' is not packed in data: run `bicovg data pack x --from PATH`"),
        ("data verify ../x", "data set name '../x' is not usable"),
        (
            "train cifar100-bicovg",
            "data set 'cifar100' is not packed in data: run `bicovg data pack cifar100 --from PATH`",
        ),
        ("train cifar100-bicovg --data.root 'my data'", "run `bicovg data pack cifar100 --from PATH --root 'my data'`"),
        ("train digits --data.name pets --data.image_size 24", "run `bicovg data pack pets --from PATH --size 24`"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_two(
    capsys: pytest.CaptureFixture[str], line: str, message: str
) -> None:
    write_classes(Path("photos"), ["cat", "dog"], 5)
    code, out, err = run(capsys, line)
    assert (code, out) == (2, "")
    assert re.search(message, err), err
    assert err.startswith("bicovg: ")
    assert err.count("\n") == 1
    assert not Path("data").exists() or not list(Path("data").glob("[!.]*"))


def build_cifar(path: Path) -> Path:
    images = np.stack([picture(i) for i in range(100)])
    return write_tar(Path("cifar-100-binary.tar.gz"), write_cifar_binary(path / "cifar-100-binary", images, images))


def build_tiny(path: Path) -> Path:
    return write_parquet(path, labelled_rows(400, 200, 64, format="JPEG"), labelled_rows(200, 200, 64), 200, "valid")


def build_ilsvrc(path: Path) -> Path:
    """The hundred synsets and one more, of one small image each but for the first."""
    small = encode(picture(0, 40, 60), "JPEG")
    for split in ("train", "val"):
        for synset in [*read_class_list(IMAGENET100), "n00000001"]:
            (path / split / synset).mkdir(parents=True)
            (path / split / synset / f"{synset}_1.JPEG").write_bytes(small)
    return path


@pytest.mark.parametrize(
    ("recipe", "build", "size"),
    [
        ("cifar100-bicovg", build_cifar, (32, 32)),
        ("tiny-imagenet-bicovg", build_tiny, (64, 64)),
        ("imagenet100-bicovg", build_ilsvrc, None),
    ],
)
def test_the_command_that_missing_data_names_packs_what_the_recipe_needs(
    capsys: pytest.CaptureFixture[str], recipe: str, build: object, size: tuple[int, int] | None
) -> None:
    from bicovg.data.splits import load_splits
    from bicovg.recipes import get_recipe

    _, _, err = run(capsys, f"train {recipe}")
    named = re.search(r"`bicovg (data pack .*)`", err)
    assert named is not None
    path = build(Path("source"))  # type: ignore[operator]
    code, out, _ = run(capsys, named[1].replace("PATH", str(path)))
    assert code == 0, out
    config = get_recipe(recipe).data
    splits = load_splits(config)
    assert len(splits.classes) == config.num_classes
    assert PackedStore.open(Path("data"), config.name).size == size


def test_imagenet100_takes_the_shipped_synsets_in_their_order_at_short_side_256(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(capsys, f"data pack imagenet100 --from {build_ilsvrc(Path('ilsvrc'))}")[0] == 0
    store = PackedStore.open(Path("data"), "imagenet100")
    assert store.classes == tuple(read_class_list(IMAGENET100))
    assert store.split("train").image(0).shape == (256, 384, 3)
    assert store.split("test").labels.tolist() == list(range(100))
    Path("two.txt").write_text("n02488291\nn00000001\n")
    assert run(capsys, "data pack imagenet100 --from ilsvrc --classes two.txt --size 8 --force")[0] == 0
    assert PackedStore.open(Path("data"), "imagenet100").classes == ("n02488291", "n00000001")


def test_an_incomplete_benchmark_is_packed_with_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    write_tiny_imagenet(Path("tiny-imagenet-200"))
    code, _, err = run(capsys, "data pack tiny-imagenet --from tiny-imagenet-200")
    assert code == 0
    assert "warning: tiny-imagenet has 100,000 train images, 6 were packed" in err


def test_every_rejected_file_is_printed_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    write_classes(Path("photos"), ["cat", "dog"], 10)
    for i in range(5):
        Path(f"photos/cat/broken{i}.jpg").write_bytes(b"<html>")
    code, _, err = run(capsys, "data pack pets --from photos")
    assert code == 2
    for i in range(5):
        assert f"rejected cat/broken{i}.jpg: the file is HTML or XML, not one of JPEG, PNG, WEBP, BMP\n" in err
    assert err.splitlines()[-1].endswith("; replace them or raise --max-rejected")
    code, _, err = run(capsys, "data pack pets --from photos --max-rejected 0.5")
    assert code == 0
    assert err.count("rejected cat/broken") == 5


def test_progress_lines_in_a_log_have_rate_and_remaining_time(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    moments = iter([0.0, 4.0, 12.0, 13.0, 25.0])
    monkeypatch.setattr(command.time, "monotonic", lambda: next(moments))
    progress = command.PlainProgress("images")
    for done in (0, 400, 1200, 1300, 2500):
        progress("train", done, 5000)
    assert capsys.readouterr().err == (
        "train: 1,200 of 5,000 images, 100 images/s, 38 s left\ntrain: 2,500 of 5,000 images, 100 images/s, 25 s left\n"
    )


def test_the_bar_on_a_terminal_has_rate_and_remaining_time() -> None:
    write_parquet(Path("shards"), labelled_rows(2000, 2, 8), labelled_rows(200, 2, 8), 2)
    master, slave = pty.openpty()
    words = [sys.executable, "-m", "bicovg", "data", "pack", "set", "--from", "shards"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "120"}
    process = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=slave)
    os.close(slave)
    shown = b""
    try:
        while block := os.read(master, 4096):
            shown += block
    except OSError:  # Linux says so when the other side is closed
        pass
    process.communicate()
    os.close(master)
    assert process.returncode == 0, shown.decode()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())
    assert re.search(r"train .*2000/2000 [\d,]+ images/s \d:\d\d:\d\d", text), text


def test_help_needs_neither_torch_nor_pillow() -> None:
    script = (
        "import sys, bicovg.cli\n"
        "try:\n    bicovg.cli.main(['data', 'pack', '--help'])\n"
        "except SystemExit:\n    pass\n"
        "print(sorted({'torch', 'PIL', 'numpy', 'pyarrow'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[-1] == "[]"
