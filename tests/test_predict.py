"""Predicting image files: what a file gives, by every head, with no data set and no labels in reach."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import bicovg.data.splits
from bicovg.cli import main
from bicovg.config import Config, override
from bicovg.data.decode import decode_image
from bicovg.data.digits import load_digits
from bicovg.data.images import VariableImages
from bicovg.data.splits import Splits, make_loaders
from bicovg.errors import UserError
from bicovg.export import export_run, load
from bicovg.fusion import LogisticFusion, mean_logits
from bicovg.predict import predict_files, read_image
from bicovg.runlog import read_config
from bicovg.trainer import Trainer

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def pictures(tmp_path: Path) -> list[str]:
    """Five digits as PNG files."""
    names = []
    for index, pixels in enumerate(load_digits()[0][:5, :, :, 0]):
        path = tmp_path / f"digit{index}.png"
        Image.fromarray(pixels).save(path)
        names.append(str(path))
    return names


def logits_of_first_digits(run: Path) -> torch.Tensor:
    trainer = Trainer.open(run, read_config(run))
    images = torch.from_numpy(load_digits()[0][:5]).permute(0, 3, 1, 2).float() / 255
    mean, std = (torch.tensor(value)[:, None, None] for value in (trainer.splits.mean, trainer.splits.std))
    with torch.no_grad():
        return trainer.net.eval()((images - mean) / std)


@pytest.mark.parametrize("head", ["mean", "fused", "best", "last", "0", "2"])
def test_probabilities_are_those_of_the_chosen_head(head: str, finished_run: Path, pictures: list[str]) -> None:
    logits = logits_of_first_digits(finished_run)
    summary = json.loads((finished_run / "summary.json").read_text())
    expected = {
        "mean": mean_logits(logits),
        "fused": torch.einsum("e,ebk->bk", torch.tensor(summary["fusion"]["heldout"]["weights"]), logits),
        "best": logits[summary["test"]["best_heldout_chosen"]["exit"]],
        "last": logits[3],
        "0": logits[0],
        "2": logits[2],
    }[head].softmax(dim=1)
    found = list(predict_files(finished_run, pictures, head, top=10, device="cpu"))
    assert [prediction.image for prediction in found] == pictures
    for row, prediction in zip(expected, found, strict=True):
        ranked = [probability for _, probability in prediction.classes]
        assert ranked == sorted(ranked, reverse=True)
        by_class = dict(prediction.classes)
        assert [by_class[str(k)] for k in range(10)] == pytest.approx(row.tolist(), abs=1e-5)


def test_prediction_opens_no_data_set(
    finished_run: Path, pictures: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Labels can be absent or shuffled: they are not in reach."""
    before = list(predict_files(finished_run, pictures, device="cpu"))

    def refuse(*_: object) -> None:
        raise AssertionError("prediction opened a data set")

    monkeypatch.setattr(bicovg.data.splits, "load_splits", refuse)
    monkeypatch.setattr("bicovg.trainer.load_splits", refuse)
    monkeypatch.setattr("bicovg.data.digits.load_digits", refuse)
    copy = tmp_path / "run"
    shutil.copytree(finished_run, copy)
    assert list(predict_files(copy, pictures, device="cpu")) == before


def test_a_picture_gets_the_same_answer_alone_and_among_others(finished_run: Path, pictures: list[str]) -> None:
    together = list(predict_files(finished_run, pictures, device="cpu"))
    for name, among in zip(pictures, together, strict=True):
        (alone,) = predict_files(finished_run, [name], device="cpu")
        assert [label for label, _ in alone.classes] == [label for label, _ in among.classes]
        assert [p for _, p in alone.classes] == pytest.approx([p for _, p in among.classes], abs=1e-5)


def test_pictures_of_other_sizes_and_colours_are_fitted_to_the_network(finished_run: Path, tmp_path: Path) -> None:
    pixels = load_digits()[0][0, :, :, 0]
    large = np.kron(pixels, np.ones((4, 4), np.uint8))
    Image.fromarray(large).convert("RGB").save(tmp_path / "large.bmp")
    Image.fromarray(pixels).save(tmp_path / "plain.png")
    one, two = predict_files(finished_run, [str(tmp_path)], device="cpu")  # a folder gives all its images
    assert [Path(p.image).name for p in (one, two)] == ["large.bmp", "plain.png"]
    assert one.classes[0][0] == two.classes[0][0]


class OnePicture:
    """A store's split of one image, packed with the short side the config resizes to."""

    def __init__(self, path: Path, short_side: int) -> None:
        self.pixels = decode_image(path.read_bytes(), short_side=short_side)

    def image(self, i: int) -> np.ndarray:
        assert isinstance(self.pixels, np.ndarray), self.pixels
        return self.pixels


@pytest.mark.parametrize("shape", [(16, 16), (16, 21), (16, 22), (16, 23), (16, 24), (24, 16), (33, 50), (61, 33)])
@pytest.mark.parametrize("size", [12, 13])  # margins of every remainder by 4
def test_a_file_is_prepared_as_evaluation_prepares_its_packed_copy(
    shape: tuple[int, int], size: int, tmp_path: Path
) -> None:
    path = tmp_path / "picture.png"
    Image.fromarray(np.random.default_rng(size).integers(0, 256, (*shape, 3), dtype=np.uint8)).save(path)
    changes = {"data.image_size": size, "data.resize": 16, "data.image_channels": 3, "data.augment.resized_crop": size}
    config = override(Config(), {**changes, "train.batch_size": 1})
    packed = VariableImages(OnePicture(path, 16), [0])
    splits = Splits(packed, None, packed, ["a"], (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
    (batch,) = make_loaders(splits, config, torch.device("cpu"))["test"].batches(0)
    assert torch.equal(read_image(path, config), batch.images[0])


def test_the_command_prints_the_best_classes_of_every_image(
    finished_run: Path, pictures: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["predict", str(finished_run), *pictures[:2], "--top", "3", "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    for prediction in predict_files(finished_run, pictures[:2], top=3, device="cpu"):
        assert Path(prediction.image).name in text
        for _, probability in prediction.classes:
            assert f"{probability:.3f}" in text


def test_files_that_are_no_images_are_named_with_the_reason(finished_run: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.png").write_text("hello")
    (tmp_path / "empty.png").write_bytes(b"")
    for name, reason in (("absent.png", "does not exist"), ("notes.png", "cannot use"), ("empty.png", "is empty")):
        with pytest.raises(UserError, match=reason) as caught:
            list(predict_files(finished_run, [str(tmp_path / name)], device="cpu"))
        assert name in str(caught.value)


@pytest.mark.parametrize(
    ("head", "top", "message"),
    [("median", 5, "--head 'median' is unknown"), ("9", 5, r"a block among \[0, 1, 2, 3\]"), ("mean", 0, "--top 0")],
)
def test_an_impossible_question_is_refused(
    head: str, top: int, message: str, finished_run: Path, pictures: list[str]
) -> None:
    with pytest.raises(UserError, match=message):
        list(predict_files(finished_run, pictures, head, top, "cpu"))


def test_a_run_that_held_nothing_out_has_no_best_block_to_predict_with(
    finished_run: Path, pictures: list[str], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished_run, run)
    summary = json.loads((run / "summary.json").read_text())
    summary["test"]["best_heldout_chosen"] = None
    (run / "summary.json").write_text(json.dumps(summary))
    with pytest.raises(UserError, match="held no images out"):
        list(predict_files(run, pictures, "best", device="cpu"))


def test_a_bad_file_among_others_costs_its_own_line_alone(
    finished_run: Path, pictures: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "images"
    (folder / "not-an-image.png").mkdir(parents=True)
    (folder / "good.png").symlink_to(Path(pictures[0]).resolve())
    (folder / "bad.png").write_bytes(b"rubbish")
    os.mkfifo(folder / "pipe.png")
    assert main(["predict", str(finished_run), str(folder), "--format", "csv", "--top", "1", "--device", "cpu"]) == 1
    printed = capsys.readouterr()
    assert [line.split(",")[0] for line in printed.out.splitlines()[1:]] == [str(folder / "good.png")]
    assert len(printed.err.splitlines()) == 2
    assert "bad.png" in printed.err
    assert "pipe.png" in printed.err
    assert main(["predict", str(finished_run), str(folder / "bad.png"), "--device", "cpu"]) == 2


def test_every_fusion_that_was_fitted_can_predict(
    finished_run: Path, pictures: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished_run, run)
    assert main(["predict", str(run), pictures[0], "--head", "fused-heldout-temperatures"]) == 2
    said = capsys.readouterr().err
    assert f"fused-train, fused-heldout: fit them with `bicovg fuse {run} --on heldout --temperatures`, or" in said
    with pytest.raises(
        UserError, match=r"no fused-on-noise, but fused-train, fused-heldout: use one of these, or use --head"
    ):
        list(predict_files(run, pictures, "fused-on-noise", device="cpu"))
    assert main(["fuse", str(run), "--on", "heldout", "--temperatures", "--device", "cpu"]) == 0
    assert capsys.readouterr().out.endswith("with it: --head fused-heldout-temperatures\n")
    fitted = json.loads((run / "summary.json").read_text())["fusion"]
    logits = logits_of_first_digits(run)
    for name, record in (("train", fitted["train"]), ("heldout-temperatures", fitted["heldout_temperatures"])):
        fusion = LogisticFusion(4, "temperatures" in record)
        with torch.no_grad():
            fusion.alpha.copy_(torch.tensor(record["weights"]).log())
            if fusion.log_temperature is not None:
                assert max(abs(t - 1) for t in record["temperatures"]) > 0.01
                fusion.log_temperature.copy_(torch.tensor(record["temperatures"]).log())
            expected = fusion(logits).softmax(dim=1)
        head = f"fused-{name}"
        found = list(predict_files(run, pictures, head, top=10, device="cpu"))
        for row, prediction in zip(expected, found, strict=True):
            by_class = dict(prediction.classes)
            assert [by_class[str(k)] for k in range(10)] == pytest.approx(row.tolist(), abs=1e-5)
    export_run(run, head, tmp_path / "out", ["hub"])
    images = torch.from_numpy(load_digits()[0][:5]).permute(0, 3, 1, 2).float() / 255
    with torch.no_grad():
        torch.testing.assert_close(load(tmp_path / "out")(images).softmax(dim=1), expected, rtol=0, atol=1e-4)


def test_hidden_files_of_a_folder_are_left_out_and_a_file_given_twice_comes_twice(
    finished_run: Path, pictures: list[str], tmp_path: Path
) -> None:
    folder = tmp_path / ".images"
    for place in (folder / "a.png", folder / "._a.png", folder / ".hidden" / "b.png"):
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(pictures[0], place)
    found = list(predict_files(finished_run, [str(folder), str(folder / "a.png"), pictures[1]], device="cpu"))
    assert [prediction.image for prediction in found] == [str(folder / "a.png")] * 2 + [pictures[1]]


@pytest.mark.parametrize("form", ["table", "csv"])
def test_names_that_the_terminal_cannot_show_cost_no_prediction(
    form: str, finished_run: Path, pictures: list[str], tmp_path: Path
) -> None:
    place = tmp_path / "\u65e5\u672c.png"
    shutil.copy(pictures[0], place)
    words = [sys.executable, "-m", "bicovg", "predict", str(finished_run), str(place), "--format", form]
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*words, "--device", "cpu"], capture_output=True, env=environment)
    assert done.returncode == 0, done.stderr.decode()
    assert b"\\u65e5\\u672c.png" in done.stdout


def test_a_head_beside_early_exit_is_refused(finished_run: Path, pictures: list[str]) -> None:
    assert main(["predict", str(finished_run), pictures[0], "--head", "last", "--early-exit", "0.9"]) == 2
