"""A run that its data do not fit is refused in one sentence that names the flags, before there is a run folder."""

from pathlib import Path

import numpy as np
import pytest
import torch
from archives import encode, picture

from bicovg.cli import main
from bicovg.config import Config, override
from bicovg.data import crops
from bicovg.data.sources import open_source
from bicovg.data.splits import load_splits
from bicovg.data.store import pack
from bicovg.distributed import Team
from bicovg.errors import UserError
from bicovg.preparation import build_on, check_fit
from bicovg.trainer import Trainer

NETWORK = (
    *("--model.channels", "8,8", "--model.pools", "0", "--model.scales", "[[1,2],[1,2]]", "--model.groups", "1,1"),
    *("--train.epochs", "1", "--train.batch_size", "4"),
)
STORE = ("train", "digits", *NETWORK, "--data.name", "set", "--data.image_channels", "3", "--data.num_classes", "2")


def pack_images(images: list[np.ndarray]) -> None:
    """The images in turn in two classes of a store without a size of its own."""
    for index, pixels in enumerate(images):
        path = Path(f"tree/{'ab'[index % 2]}/{index}.png")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encode(pixels))
    pack(open_source(Path("tree")), Path("data"), "set")


def black_in(channel: int, pixels: np.ndarray) -> np.ndarray:
    pixels[..., channel] = 0
    return pixels


SEVERAL = [picture(i, 8 + i, 8 + i % 3) for i in range(20)]
UNUSABLE = {
    "several sizes": (SEVERAL, "", ["several sizes", "--data.augment.resized_crop 8 and --data.resize 8", "--size 8"]),
    "several sizes in the test": (SEVERAL, "--data.augment.resized_crop 8", ["several sizes", "--data.resize 8"]),
    "several sizes in training": (SEVERAL, "--data.resize 8", ["several sizes", "--data.augment.resized_crop 8"]),
    "all black": ([np.zeros((8, 8, 3), np.uint8)] * 20, "", ["channel 0", "--data.normalise imagenet", "images that"]),
    "no blue": ([black_in(2, picture(i, 8)) for i in range(20)], "", ["channel 2", "--data.normalise imagenet"]),
    "not square": ([picture(i, 8, 12) for i in range(20)], "", ["8x12: pack them again with --size 8"]),
    "another size": ([picture(i, 9) for i in range(20)], "", ["9x9: use 9, or pack them again with --size 8"]),
}


@pytest.mark.parametrize("case", UNUSABLE)
def test_a_store_that_does_not_fit_is_refused_before_there_is_a_folder(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    images, more, needles = UNUSABLE[case]
    pack_images(images)
    capsys.readouterr()
    assert main([*STORE, *more.split(), "--out", "run"]) == 2
    (sentence,) = capsys.readouterr().err.splitlines()
    for needle in needles:
        assert needle in sentence, sentence
    assert not Path("run").exists()


@pytest.mark.parametrize("case", ["several sizes", "all black", "not square", "another size"])
def test_the_repair_that_the_sentence_names_repairs_it(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    pack_images(UNUSABLE[case][0])
    repair = {
        "several sizes": "--data.augment.resized_crop 8 --data.resize 8",
        "all black": "--data.normalise imagenet",
        "another size": "--data.image_size 9",
    }
    if case == "not square":
        assert main(["data", "pack", "set", "--from", "tree", "--size", "8", "--force"]) == 0
    assert main([*STORE, *repair.get(case, "").split(), "--out", "run"]) == 0


class Two(Team):
    """What the first of two processes knows of its team."""

    data = world = 2


def test_batch_norm_is_refused_the_share_of_a_process_that_is_one_value() -> None:
    one = {"model.channels": (8, 8, 8, 8), "model.pools": (0, 1, 2), "model.scales": ((1,),) * 4}
    config = override(Config(), {**one, "train.batch_size": 2})
    splits, net = load_splits(config.data), build_on(config, torch.device("cpu"))
    check_fit(config, splits, net, Team())
    with pytest.raises(UserError, match=r"block 3: batch norm .* 1x1 map of one image"):
        check_fit(config, splits, net, Two())
    check_fit(override(config, {"train.batch_norm_stats": "synced"}), splits, net, Two())
    check_fit(override(config, {"train.batch_size": 4}), splits, net, Two())
    plain = override(config, {"model.batch_norm": False, "train.batch_size": 1})
    check_fit(plain, splits, build_on(plain, torch.device("cpu")), Team())


def test_what_only_the_engine_finds_wrong_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise UserError("no such engine here")

    monkeypatch.setattr("bicovg.trainer.make_engine", refuse)
    with pytest.raises(UserError, match="no such engine here"):
        Trainer.start(Config(), str(tmp_path / "run"))
    assert list(tmp_path.iterdir()) == []


def test_a_batch_with_more_pixels_than_places_is_refused() -> None:
    huge = {"data.image_size": 8, "data.augment.flip": True, "train.batch_size": 1000}
    config = override(Config(), huge)
    splits, net = load_splits(config.data), build_on(config, torch.device("cpu"))
    check_fit(config, splits, net, Team())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bicovg.preparation.MAX_PLACES", 64_000)
        with pytest.raises(UserError, match=r"--train.batch_size 1000 has 64000 pixels"):
            check_fit(config, splits, net, Team())
        check_fit(config, splits, net, Two())
    images, zeros = torch.zeros(2, 2, 2, 1, dtype=torch.uint8), torch.zeros(2, dtype=torch.int32)
    with pytest.raises(UserError, match="2 images of 2x2, padded by 20000, are too many pixels"):
        crops.crop_padded(images, zeros, zeros, 20_000)
