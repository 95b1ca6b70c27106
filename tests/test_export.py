"""Exports equal PyTorch for every head; the folder loads by itself; nothing half-made is left behind."""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import bicovg
import bicovg.config
import bicovg.export as export_module
from bicovg.cli import main
from bicovg.data.digits import load_digits
from bicovg.errors import UserError
from bicovg.export import Predictor, cut_network, export_run, load, make_predictor, write_formats
from bicovg.export_graph import open_onnx, open_torch, trace, write_torch
from bicovg.model_card import model_card
from bicovg.networks import local_network, vgg16_classic
from bicovg.predict import head_weights, load_run
from bicovg.recipes import get_recipe

HEADS = ("mean", "fused", "best", "last", "0", "1", "2", "3")


def real_images(count: int = 64) -> Tensor:
    return torch.from_numpy(load_digits()[0][:count]).permute(0, 3, 1, 2).float() / 255


def reference(run: Path, head: str, images: Tensor) -> Tensor:
    """The head by its definition, from the run itself."""
    net, _ = load_run(run, "cpu")
    data = json.loads((run / "data.json").read_text())
    mean, std = (torch.tensor(data[name])[:, None, None] for name in ("mean", "std"))
    with torch.no_grad():
        logits = net((images - mean) / std)
    return torch.einsum("e,ebk->bk", torch.tensor(head_weights(head, run, net.exits)), logits)


@pytest.fixture(scope="module")
def exported(finished_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("export") / "digits-fused"
    assert main(["export", str(finished_run), "--head", "fused", "--out", str(out)]) == 0
    return out


@pytest.mark.parametrize("head", HEADS)
def test_every_head_loads_and_equals_the_run(head: str, finished_run: Path, tmp_path: Path) -> None:
    export_run(finished_run, head, tmp_path / "out", ["hub"])
    model = bicovg.load(tmp_path / "out")
    for images in (torch.rand(1, 1, 8, 8), torch.rand(64, 1, 8, 8), real_images(1), real_images()):
        assert torch.allclose(model(images), reference(finished_run, head, images), atol=1e-4)
    assert model.classes == tuple(str(k) for k in range(10))


def test_images_of_another_kind_are_refused(finished_run: Path, tmp_path: Path) -> None:
    export_run(finished_run, "mean", tmp_path / "out", ["hub"])
    model = bicovg.load(tmp_path / "out")
    for images in (torch.rand(2, 3, 8, 8), torch.rand(2, 1, 8, 8, dtype=torch.float64)):
        with pytest.raises(ValueError, match=r"give float32 in \[0, 1\], \(batch, 1, height, width\)"):
            model(images)


@pytest.mark.parametrize("head", HEADS)
def test_torch_export_and_onnx_agree_for_every_head(head: str, finished_run: Path, tmp_path: Path) -> None:
    net, config = load_run(finished_run, "cpu")
    weights = head_weights(head, finished_run, net.exits)
    model = make_predictor(net, weights, list("0123456789"), [0.3], [0.4])
    checks = write_formats(model, config, tmp_path, ["torch", "onnx"])
    assert checks["images"] == "random and test"
    assert max(checks["largest_difference"].values()) <= 1e-4
    for run in (open_torch(tmp_path / "model.pt2"), open_onnx(tmp_path / "model.onnx")):
        for images in (torch.rand(1, 1, 8, 8), torch.rand(64, 1, 8, 8), real_images(1), real_images(7), real_images()):
            with torch.no_grad():
                assert np.allclose(run(images), model(images).numpy(), atol=1e-4)


def test_the_folder_is_ready_for_a_hub(exported: Path, finished_run: Path) -> None:
    names = {path.name for path in exported.iterdir()}
    assert names == {"model.safetensors", "config.json", "README.md", "model.pt2", "model.onnx"}
    card = (exported / "README.md").read_text()
    summary = json.loads((finished_run / "summary.json").read_text())
    assert card.startswith("---\nlibrary_name: bicovg\n")
    assert f"| mean of blocks | {summary['test']['mean']['top1']:.2f} |" in card
    assert "bicovg train digits --data.holdout 0.1" in card
    description = json.loads((exported / "config.json").read_text())
    assert description["input"]["shape"] == [None, 1, 8, 8]
    assert not list(exported.parent.glob(".*"))


def test_a_moved_folder_loads_without_run_or_data(exported: Path, finished_run: Path, tmp_path: Path) -> None:
    for name in ("model.safetensors", "config.json"):
        shutil.copy(exported / name, tmp_path)
    images = real_images(3)
    assert torch.allclose(load(tmp_path)(images), reference(finished_run, "fused", images), atol=1e-5)


def test_an_export_made_before_a_setting_existed_still_loads(exported: Path, tmp_path: Path) -> None:
    shutil.copy(exported / "model.safetensors", tmp_path)
    description = json.loads((exported / "config.json").read_text())
    del description["config"]["train"]["clip_scope"], description["config"]["fusion"]
    (tmp_path / "config.json").write_text(json.dumps(description))
    images = real_images(3)
    assert torch.equal(load(tmp_path)(images), load(exported)(images))


def test_a_shallow_head_leaves_the_deep_blocks_out(finished_run: Path, tmp_path: Path) -> None:
    export_run(finished_run, "0", tmp_path / "first", ["hub"])
    export_run(finished_run, "last", tmp_path / "last", ["hub"])
    small, whole = ((tmp_path / name / "model.safetensors").stat().st_size for name in ("first", "last"))
    assert small < whole / 2
    assert json.loads((tmp_path / "first" / "config.json").read_text())["exit_blocks"] == [0]


@pytest.mark.parametrize("exits", [1, 2, 3])
def test_a_cut_inside_a_unit_keeps_the_exits_before_it(exits: int) -> None:
    net = local_network(3, (8, 8, 8, 8), in_channels=1, scope="grouped", groups=(3, 1)).eval()
    images = torch.randn(2, 1, 8, 8)
    short = cut_network(net, exits)
    assert short.exits == list(range(exits))
    with torch.no_grad():
        assert torch.allclose(short(images), net(images)[:exits], atol=1e-6)


def test_the_classic_network_of_one_exit_exports(tmp_path: Path) -> None:
    model = Predictor(vgg16_classic(3, 1, width=0.05).eval(), [1.0], list("abc"), [0.5], [0.5]).eval()
    run = open_torch(write_torch(trace(model, torch.rand(2, 1, 32, 32)), tmp_path))
    images = torch.rand(5, 1, 32, 32)
    with torch.no_grad():
        assert np.allclose(run(images), model(images).numpy(), atol=1e-5)


def test_a_file_that_disagrees_is_never_published(
    finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import bicovg.export_graph

    def wrong(path: Path) -> bicovg.export_graph.Run:
        run = open_torch(path)
        return lambda images: run(images) + np.float32(0.01)

    monkeypatch.setattr(bicovg.export_graph, "open_torch", wrong)
    with pytest.raises(UserError, match=r"differs from PyTorch by 0\.01"):
        export_run(finished_run, "last", tmp_path / "out", ["torch"])
    assert list(tmp_path.iterdir()) == []


def test_wrong_input_is_one_sentence(
    finished_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    unfinished = tmp_path / "unfinished"
    shutil.copytree(finished_run, unfinished)
    (unfinished / "summary.json").unlink()
    (tmp_path / "file").write_text("")
    run = str(finished_run)
    for words, needle in (
        ([run, "--head", "9"], "--head '9' is unknown"),
        ([run, "--format", "tflite"], "'tflite'"),
        ([run, "--format", "hub", "--out", str(tmp_path)], "exists"),
        ([run, "--format", "hub", "--out", str(tmp_path / "file" / "x")], "cannot write"),
        ([str(unfinished)], "unfinished"),
        ([str(tmp_path / "nowhere")], "not a run folder"),
    ):
        assert main(["export", *words]) == 2
        (sentence,) = capsys.readouterr().err.strip().splitlines()
        assert needle in sentence
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert main(["export", run, "--out", str(tmp_path / "x")]) == 2
    assert "bicovg[export]" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("config.json", lambda blob: b"{"),
        ("config.json", lambda blob: blob.replace(b'"format_version": 1', b'"format_version": 99')),
        ("config.json", lambda blob: blob.replace(b'"library": "bicovg"', b'"library": "other"')),
        ("config.json", lambda blob: blob.replace(b'"weights"', b'"w"')),
        ("config.json", lambda blob: blob.replace(b'"num_classes": 10', b'"num_classes": 11')),
        ("model.safetensors", lambda blob: blob[: len(blob) // 2]),
        ("model.safetensors", lambda blob: b"\x80\x02cos\nsystem\n"),
    ],
)
def test_a_damaged_folder_is_one_sentence(name: str, damage: object, exported: Path, tmp_path: Path) -> None:
    for part in ("model.safetensors", "config.json"):
        shutil.copy(exported / part, tmp_path)
    (tmp_path / name).write_bytes(damage((tmp_path / name).read_bytes()))  # type: ignore[operator]
    with pytest.raises(UserError, match="bicovg export"):
        load(tmp_path)


def test_loading_what_is_no_export_is_refused(finished_run: Path) -> None:
    with pytest.raises(UserError, match=r"has no model\.safetensors"):
        load(finished_run)


def test_random_images_do_where_the_data_set_is_not_at_hand(tmp_path: Path) -> None:
    config = bicovg.config.override(get_recipe("cifar100-bicovg"), {"data.root": str(tmp_path)})
    images, kinds = export_module.sample_images(config)
    assert kinds == "random"
    assert images.shape == (64, 3, 32, 32)


def test_the_card_says_what_the_scope_means(finished_run: Path) -> None:
    summary = json.loads((finished_run / "summary.json").read_text())
    checks = {"images": "random", "largest_difference": {}}
    strict = model_card("m", get_recipe("digits"), summary, "mean", [0, 1], checks)
    whole = model_card("m", get_recipe("digits-bp"), summary, "last", [3], checks)
    assert "BP-free" in strict
    assert "BP-free" not in whole
    assert "backpropagation" in whole
