"""Early exit: exits one by one equal all at once, temperatures calibrate, and less compute is really less."""

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

import bicovg.early_exit as early
from bicovg.calibration import RULES, calibration_error, combine_exits, fit_temperature, rule_weights
from bicovg.cli import main
from bicovg.data.digits import load_digits
from bicovg.early_exit import (
    count_exit_macs,
    first_confident,
    measure_early_exit,
    pick_points,
    predict_early,
    trace_curve,
    walk_exits,
)
from bicovg.fusion import LogisticFusion, mean_logits, top_k_accuracy
from bicovg.localization import localize
from bicovg.networks import LocalNetwork, local_network, vgg16_classic
from bicovg.recipes import get_recipe
from bicovg.roofline import trace_layers

SETTINGS = {
    "strict": {},
    "grouped": {"scope": "grouped", "groups": (2, 2), "alignment": True},
    "hgb": {"scope": "hgb", "group_size": 2, "alignment": True},
    "end-to-end": {"scope": "end-to-end", "exits": "all"},
}


def small_net(scope: str = "strict") -> LocalNetwork:
    net = local_network(5, (8, 16, 16, 32), (1,), in_channels=1, **SETTINGS[scope])  # type: ignore[arg-type]
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_()  # type: ignore[union-attr]
    return net.eval()


@pytest.mark.parametrize("scope", SETTINGS)
def test_exits_one_by_one_equal_all_at_once(scope: str) -> None:
    net, images = small_net(scope), torch.randn(3, 1, 8, 8)
    with torch.no_grad():
        walked = torch.stack(list(walk_exits(net, images)))
        assert torch.equal(walked, net(images))


def test_exits_that_are_not_wanted_are_not_judged() -> None:
    net, images = small_net(), torch.randn(3, 1, 8, 8)
    judged: list[int] = []
    for index, unit in enumerate(net.units):
        unit.blocks[0].readout.register_forward_hook(lambda *_, index=index: judged.append(index))  # type: ignore[index, union-attr, misc]
    with torch.no_grad():
        first, second = walk_exits(net, images, only=(0, 2))
        assert judged == [0, 2]
        assert torch.equal(torch.stack([first, second]), net(images)[[0, 2]])


def test_a_network_of_one_exit_can_be_walked() -> None:
    net, images = vgg16_classic(5, 1, width=0.05).eval(), torch.randn(2, 1, 32, 32)
    with torch.no_grad():
        (logits,) = walk_exits(net, images)
        assert torch.equal(logits, net(images)[0])


def test_samples_that_left_are_computed_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    net, images = small_net(), torch.randn(6, 1, 8, 8)
    seen: list[int] = []
    for unit in net.units:
        unit.blocks[0].conv.register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs[0])))  # type: ignore[index, union-attr]
    keep = torch.tensor([True, False, True, True, False, False])
    with torch.no_grad():
        walk = walk_exits(net, images)
        next(walk)
        rest = walk.send(keep)
        expected = net(images)[1][keep]
    assert seen[:2] == [6, 3]
    assert torch.allclose(rest, expected, atol=1e-6)


@pytest.mark.parametrize("recipe", ["digits", "digits-hgb2", "cifar100-bicovg-fal", "digits-per-channel"])
def test_multiply_adds_are_those_of_the_layer_tables(recipe: str) -> None:
    from bicovg.methods import build_network

    config = get_recipe(recipe)
    with torch.device("meta"):
        net = build_network(config.model, config.data.num_classes, config.data.image_channels)
    side = config.data.image_size
    expected, total = [], 0
    for layer in trace_layers(config):
        total += layer.conv_macs + layer.projections * layer.features + layer.goodness * config.data.num_classes
        total += 2 * layer.before * 512 if layer.aligned else 0
        if layer.goodness:
            expected.append(total)
    assert count_exit_macs(net, (config.data.image_channels, side, side)) == expected


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_looks_at_no_later_exit(rule: str) -> None:
    logits, labels = made_up()
    weights = rule_weights(rule, logits, labels)
    assert torch.equal(weights, weights.tril())
    assert torch.allclose(weights.sum(dim=1), torch.ones(4))
    later = logits.clone()
    later[2:] += 100
    assert torch.equal(combine_exits(later, weights)[:2], combine_exits(logits, weights)[:2])


def test_the_running_mean_ends_at_the_plain_mean_and_fusion_at_logistic_fusion() -> None:
    logits, labels = made_up()
    mean = combine_exits(logits, rule_weights("mean", logits, labels))
    assert torch.allclose(mean[-1], mean_logits(logits), atol=1e-5)
    assert torch.equal(mean[0], logits[0])
    fused = combine_exits(logits, rule_weights("fused", logits, labels))
    assert torch.allclose(fused[-1], LogisticFusion(4).fit(logits, labels)(logits), atol=1e-4)


@pytest.mark.parametrize("true", [0.3, 1.0, 4.0])
def test_the_temperature_that_made_the_labels_is_found(true: float) -> None:
    logits = 3 * torch.randn(20_000, 4, dtype=torch.float64)
    labels = torch.distributions.Categorical(logits=logits / true).sample()
    assert fit_temperature(logits, labels) == pytest.approx(true, rel=0.06)
    assert fit_temperature(logits, labels, least=1.0) == pytest.approx(max(true, 1.0), rel=0.06)


def test_no_temperature_on_a_grid_is_better() -> None:
    logits, labels = torch.randn(500, 6), torch.randint(6, (500,))
    best = float(F.cross_entropy(logits / fit_temperature(logits, labels), labels))
    for t in np.geomspace(0.03, 45, 60):
        assert best <= float(F.cross_entropy(logits / t, labels)) + 1e-6


def test_calibration_error_of_a_sure_net_is_its_error_rate() -> None:
    labels = torch.tensor([0, 0, 0, 1])
    sure = torch.tensor([[50.0, 0.0]] * 4)
    assert calibration_error(sure, labels) == pytest.approx(25.0)
    honest = torch.tensor([[math.log(3.0), 0.0]] * 4)  # says 75 %, and is right three times in four
    assert calibration_error(honest, labels) == pytest.approx(0.0, abs=1e-4)


def test_the_first_confident_exit_is_taken_and_else_the_last() -> None:
    confidence = torch.tensor([[0.9, 0.2, 0.1], [0.1, 0.8, 0.1], [0.1, 0.1, 0.1]])
    assert first_confident(confidence, 0.7).tolist() == [0, 1, 2]


def made_up() -> tuple[Tensor, Tensor]:
    """Exits that get better with depth."""
    labels = torch.randint(5, (800,))
    noise = torch.randn(4, 800, 5)
    return noise + F.one_hot(labels, 5) * torch.tensor([1.0, 2.0, 3.0, 4.0])[:, None, None], labels


@pytest.mark.parametrize("rule", RULES)
def test_a_curve_runs_from_the_first_exit_to_the_whole_network(rule: str) -> None:
    logits, labels = made_up()
    macs = [10, 30, 60, 100]
    combined = combine_exits(logits, rule_weights(rule, logits, labels))
    curve = trace_curve(combined, labels, [1.0] * 4, macs)
    assert curve[0]["exits"] == [1.0, 0.0, 0.0, 0.0]
    assert curve[0]["compute"] == pytest.approx(0.1)
    assert curve[0]["top1"] == top_k_accuracy(logits[0], labels)
    assert curve[-1]["top1"] == pytest.approx(top_k_accuracy(combined[-1], labels))
    assert curve[-1]["compute"] == 1.0
    costs = [point["compute"] for point in curve]
    assert costs == sorted(costs)
    assert all(sum(point["exits"]) == pytest.approx(1, abs=1e-3) for point in curve)


def test_points_are_chosen_by_compute_alone() -> None:
    logits, labels = made_up()
    curve = trace_curve(logits, labels, [1.0] * 4, [10, 30, 60, 100])
    shuffled = trace_curve(logits, labels[torch.randperm(800)], [1.0] * 4, [10, 30, 60, 100])
    for point, other in zip(pick_points(curve), pick_points(shuffled), strict=True):
        assert point["threshold"] == other["threshold"]
        assert point["compute"] <= 1 / point["speedup"]
        assert point["points_lost"] == pytest.approx(curve[-1]["top1"] - point["top1"])


def test_calibration_lowers_the_error_on_unseen_images() -> None:
    fit, test = made_up(), made_up()
    rules = measure_early_exit((5 * fit[0], fit[1]), (5 * test[0], test[1]), [1, 2, 3, 4], heldout=True)
    assert tuple(rules) == RULES
    for rule in RULES:
        before, after = rules[rule]["ece_before"], rules[rule]["ece_after"]
        assert max(after) < 5 < max(before)
        assert sum(after) < sum(before)


@pytest.mark.parametrize("rule", RULES)
def test_predictions_on_the_way_equal_those_of_the_curve(rule: str) -> None:
    net, images = small_net(), torch.randn(40, 1, 8, 8)
    temperatures = [0.5, 0.8, 0.7, 0.9]
    with torch.no_grad():
        logits = net(images)
    weights = rule_weights(rule, logits, torch.randint(5, (40,)))
    combined = combine_exits(logits, weights)
    scaled = (combined / torch.tensor(temperatures)[:, None, None]).softmax(dim=2)
    threshold = float(scaled.amax(dim=2)[0].median())  # half the images leave at once
    exits = first_confident(scaled.amax(dim=2), threshold)
    probabilities, left_by = predict_early(net, images, weights, temperatures, threshold)
    assert left_by.tolist() == exits.tolist()
    assert len(set(left_by.tolist())) > 1
    assert torch.allclose(probabilities, scaled[exits, torch.arange(40)], atol=1e-5)


def test_a_localized_network_can_be_left_early() -> None:
    net = localize(
        nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU()), 3, image_shape=(1, 8, 8)
    )
    _, left_by = predict_early(net.eval(), torch.randn(4, 1, 8, 8), torch.eye(2), [1.0, 1.0], 0.0)
    assert left_by.tolist() == [0] * 4
    assert count_exit_macs(net, (1, 8, 8))[0] < count_exit_macs(net, (1, 8, 8))[1]


@pytest.fixture(scope="module")
def calibrated_run(finished_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("calibrated") / "run"
    shutil.copytree(finished_run, run)
    assert main(["eval", str(run), "--early-exit", "--device", "cpu"]) == 0
    return run


def test_the_command_says_what_calibration_brings(calibrated_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(calibrated_run), "--early-exit", "--device", "cpu"]) == 0
    rule = json.loads((calibrated_run / "early_exit.json").read_text())["rules"]["fused"]
    after, before = rule["ece_after"][-1], rule["ece_before"][-1]
    said = f"confidences are off by {after:.1f} points in the mean, {before:.1f} without"
    assert f"temperatures fitted on held-out images: {said}" in " ".join(capsys.readouterr().out.split())


def test_the_command_writes_what_a_record_needs(calibrated_run: Path) -> None:
    found = json.loads((calibrated_run / "early_exit.json").read_text())
    summary = json.loads((calibrated_run / "summary.json").read_text())
    assert found["calibrated_on"] == "held-out"
    assert found["images"] == 359
    assert found["rules"]["mean"]["full"]["top1"] == pytest.approx(summary["test"]["mean"]["top1"])
    assert found["rules"]["fused"]["full"]["top1"] == pytest.approx(summary["fusion"]["heldout"]["top1"])
    assert found["rules"]["own"]["full"]["top1"] == pytest.approx(summary["test"]["last"]["top1"])
    assert len(found["macs"]) == len(summary["exit_blocks"])


def test_a_run_that_held_nothing_out_says_that_it_is_not_calibrated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "digits", "--model.channels", "8,8", "--model.pools", "0", "--model.scales", "[[1,2],[1,2]]"]
    words += ["--model.groups", "1,1", "--train.epochs", "1", "--out", str(tmp_path / "run")]
    assert main(words) == 0
    assert main(["eval", str(tmp_path / "run"), "--early-exit", "--device", "cpu"]) == 0
    found = json.loads((tmp_path / "run" / "early_exit.json").read_text())
    assert found["calibrated_on"] == "augmented training"
    assert "fused" not in found["rules"]
    assert min(found["rules"]["mean"]["temperatures"]) >= 1.0
    assert "not calibrated: " in capsys.readouterr().out


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for index, pixels in enumerate(load_digits()[0][:5, :, :, 0]):
        place = tmp_path / "pictures" / ("a" if index % 2 else "b")
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(place / f"{index}.png")
    return tmp_path / "pictures"


def test_predict_leaves_early_and_says_by_which_block(
    calibrated_run: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = {}
    for threshold in ("0", "1"):
        words = ["predict", str(calibrated_run), str(folder), "--early-exit", threshold, "--format", "json"]
        assert main([*words, "--device", "cpu"]) == 0
        shown[threshold] = json.loads(capsys.readouterr().out)
    assert [Path(row["image"]).name for row in shown["0"]] == ["1.png", "3.png", "0.png", "2.png", "4.png"]
    assert {row["block"] for row in shown["0"]} == {0}
    assert {row["block"] for row in shown["1"]} == {3}


def test_wrong_use_is_one_sentence(
    finished_run: Path, calibrated_run: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    image = str(folder / "b" / "0.png")
    for words, needle in (
        (["predict", str(finished_run), image, "--early-exit", "0.9"], "eval"),
        (["predict", str(calibrated_run), image, "--early-exit", "90"], "between 0 and 1"),
        (["predict", str(calibrated_run), str(tmp_path / "empty")], "holds no image"),
        (["predict", str(calibrated_run), str(tmp_path / "none.png")], "does not exist"),
    ):
        assert main(words) == 2
        (sentence,) = capsys.readouterr().err.strip().splitlines()
        assert needle in sentence


def test_thresholds_of_a_curve_are_not_too_many() -> None:
    assert len(early.spread_thresholds(torch.rand(8, 5000))) <= early.THRESHOLDS + 2
