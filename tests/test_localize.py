"""Localize: any sequence of conv stages becomes isolated units, and what cannot be cut is refused with its reason."""

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import bicovg
from bicovg.localization import LocalizedNetwork, Stage, localize
from bicovg.step import local_step

EXAMPLE = Path(__file__).parent.parent / "examples" / "local_resnet_digits.py"


class Residual(nn.Module):
    def __init__(self, before: int, after: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(after)
        self.shortcut = nn.Conv2d(before, after, 1, stride)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.relu(self.norm1(self.conv1(x)))
        return self.relu(self.norm2(self.conv2(h)) + self.shortcut(x))


def plain_vgg() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Dropout(0.2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 32),
        nn.ReLU(),
        nn.Linear(32, 5),
    )


def resnet() -> nn.Sequential:
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True)),
        nn.Sequential(Residual(16, 16), Residual(16, 16)),
        nn.Sequential(Residual(16, 32, 2), Residual(32, 32)),
    )


def preactivation() -> nn.Sequential:
    """Norm and activation stand before each convolution, in place."""
    stages: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1)]
    for _ in range(2):
        stages += [nn.MaxPool2d(2), nn.ReLU(inplace=True), nn.Conv2d(16, 16, 3, padding=1)]
    return nn.Sequential(*stages)


NETWORKS = {"vgg": plain_vgg, "resnet": resnet, "preactivation": preactivation}
SCOPES = {
    "strict": {},
    "grouped": {"scope": "grouped", "groups": (1, 2)},
    "end-to-end": {"scope": "end-to-end"},
    "aligned": {"alignment": (1, 2)},
}


def cut(name: str, scope: str = "strict") -> LocalizedNetwork:
    return localize(NETWORKS[name](), 5, image_shape=(3, 16, 16), **SCOPES[scope])  # type: ignore[arg-type]


def train_step(net: LocalizedNetwork, images: Tensor, labels: Tensor, schedule: str) -> Tensor:
    optimizers = [torch.optim.SGD(unit.parameters(), 0.1) for unit in net.units]
    return local_step(net, optimizers, images, labels, schedule=schedule, keys=torch.arange(len(images)))


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("name", NETWORKS)
def test_every_network_trains_by_every_schedule_alike(name: str, scope: str) -> None:
    images, labels = torch.randn(4, 3, 16, 16), torch.randint(5, (4,))
    states = []
    for schedule in ("interleaved", "summed"):
        torch.manual_seed(0)
        net = cut(name, scope)
        before = images.clone()
        losses = train_step(net, images, labels, schedule)
        assert torch.equal(images, before), "the images were changed in place"
        assert losses.shape == (len(net.exits),)
        states.append(net.state_dict())
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


@pytest.mark.parametrize("name", NETWORKS)
def test_no_gradient_leaves_a_unit(name: str) -> None:
    """A loss at one exit moves its own stage and no weight of another."""
    net, images = cut(name), torch.randn(4, 3, 16, 16)
    logits = net(images, torch.arange(4))
    for index, exit_ in enumerate(logits):
        net.zero_grad()
        torch.autograd.backward(exit_.square().sum(), retain_graph=True)
        for other, unit in enumerate(net.units):
            touched = any(p.grad is not None and p.grad.any() for p in unit.parameters())
            assert touched == (other == index), f"loss {index}, unit {other}"


def test_the_given_network_is_left_as_it_was() -> None:
    given = plain_vgg()
    before = {name: value.clone() for name, value in given.state_dict().items()}
    net = localize(given, 5, image_shape=(3, 16, 16))
    train_step(net, torch.randn(4, 3, 16, 16), torch.randint(5, (4,)), "interleaved")
    assert all(torch.equal(value, before[name]) for name, value in given.state_dict().items())


def test_stages_compute_what_the_given_layers_compute() -> None:
    given = plain_vgg().eval()
    net = localize(given, 5, image_shape=(3, 16, 16)).eval()
    stage = net.units[0].blocks[0]  # type: ignore[index, union-attr]
    assert isinstance(stage, Stage)
    images = torch.randn(2, 3, 16, 16)
    f = stage.features(images)
    assert torch.allclose(f, F.relu(given[0](images)))
    assert torch.allclose(stage.emit(f, None), bicovg.rms_norm(f))


def test_the_report_says_what_became_of_every_layer() -> None:
    net = cut("vgg")
    lines = net.report().splitlines()
    assert lines[0] == (
        "unit 0, stage 0: Conv2d, ReLU; f is 16x16x16; goodness of 360 values and a readout; scales (2, 4)"
    )
    assert "MaxPool2d" in lines[1]
    assert "dropout 0.2 made keyed" in lines[1]
    assert lines[-1] == "dropped: AdaptiveAvgPool2d, Flatten (10), Linear (11), ReLU (12), Linear (13)"
    hgb = localize(
        nn.Sequential(*[nn.Conv2d(3 if i == 0 else 8, 8, 3, padding=1) for i in range(4)]), 5, scope="hgb", group_size=2
    )
    assert [stage.unit for stage in hgb.stages] == [0, 0, 1, 1]
    assert "no exit" in str(hgb.stages[0])
    assert hgb.exits == [1, 3]


def test_dropout_is_a_function_of_the_keys() -> None:
    net, images = cut("vgg").train(), torch.randn(4, 3, 16, 16)
    keys = torch.arange(4)
    first, again = net(images, keys), net(images, keys)
    assert torch.equal(first, again)
    assert not torch.equal(first, net(images, keys + 9))


def test_scales_follow_the_map() -> None:
    net = localize(
        nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.Conv2d(8, 8, 3, 2), nn.Conv2d(8, 8, 3)), 2, image_shape=(3, 15, 15)
    )
    found = [block.goodness.scales for unit in net.units for block in unit.blocks]  # type: ignore[union-attr]
    assert found == [(2, 4), (1, 2), (1,)]


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.conv(x)
        return y, y


class Vector(Pair):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return self.conv(x).flatten(1)


def shared() -> nn.Sequential:
    layer = nn.Conv2d(3, 3, 3, padding=1)
    wrapped = nn.Sequential(layer)
    return nn.Sequential(layer, nn.ReLU(), wrapped)


def used_twice() -> nn.Sequential:
    layer = nn.Conv2d(8, 8, 3, padding=1)
    return nn.Sequential(nn.Conv2d(3, 8, 3), layer, layer)


def one_norm() -> nn.Sequential:
    norm = nn.BatchNorm2d(8, affine=False)
    return nn.Sequential(nn.Conv2d(3, 8, 3), norm, nn.Conv2d(8, 8, 3), norm)


class Skipping(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return self[1](self[0](x)) + self[0](x)


class Careless(Pair):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return self.conv(x) * x.shape[9]


REFUSED = {
    "a layer used twice": (used_twice, "stages 1 and 2 share a weight"),
    "a norm used twice": (one_norm, "stages 0 and 2 share running statistics"),
    "a forward of its own": (
        lambda: Skipping(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, padding=1)),
        "Skipping has a forward of its own",
    ),
    "no weights yet": (
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.Sequential(nn.LazyConv2d(8, 3))),
        r"layer 1\.0 \(LazyConv2d\) has no weights yet",
    ),
    "a bounded activation": (
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.Tanh()),
        r"layer 1 \(Tanh\) is no activation that goodness is made for.*use one of ReLU, ",
    ),
    "an error of the stage's own": (lambda: nn.Sequential(Careless()), "stage 0 does not accept a 3x16x16 input"),
    "no sequence": (lambda: Residual(3, 8), "Residual is not an nn.Sequential"),
    "no convolution": (lambda: nn.Sequential(nn.Flatten(), nn.Linear(3, 3)), "no convolution"),
    "a transformer": (
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.TransformerEncoderLayer(8, 2)),
        r"layer 1 \(TransformerEncoderLayer\)",
    ),
    "a head in the middle": (
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Conv2d(8, 8, 3)),
        r"stage 2 \(Conv2d\) follows Flatten \(1\)",
    ),
    "two outputs": (lambda: nn.Sequential(Pair(), nn.Conv2d(8, 8, 3)), "stage 0 gives tuple"),
    "no maps": (lambda: nn.Sequential(Vector()), r"stage 0 gives \(2, "),
    "a shared weight": (shared, "stages 0 and 2 share a weight"),
    "wrong channels": (lambda: nn.Sequential(nn.Conv2d(4, 8, 3)), "stage 0 does not accept a 3x16x16 input"),
    "channels not divisible": (lambda: nn.Sequential(nn.Conv2d(3, 12, 3)), "stage 0: 12 channels cannot be divided"),
    "a map too small": (
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.MaxPool2d(16), nn.Conv2d(8, 8, 3)),
        "stage 0 does not accept|stage 2 does not accept",
    ),
    "unknown scope": (plain_vgg, "scope 'loose' is unknown"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_cut_is_refused_with_its_reason(case: str) -> None:
    build, reason = REFUSED[case]
    scope = "loose" if case == "unknown scope" else "strict"
    with pytest.raises(ValueError, match=reason):
        localize(build(), 5, scope=scope, image_shape=(3, 16, 16))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"alignment": (9,)}, "alignment names the stage 9: there are the stages 0 to 2"),
        ({"alignment": (1, -1)}, "alignment names the stage -1"),
        ({"num_classes": 0}, "num_classes 0 is out of range"),
        ({"num_classes": -3}, "num_classes -3 is out of range"),
    ],
)
def test_an_argument_without_a_meaning_is_refused(arguments: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        localize(plain_vgg(), **{"num_classes": 5, "image_shape": (3, 16, 16), **arguments})


def test_a_layer_without_weights_may_be_used_again_and_again() -> None:
    relu, pool = nn.ReLU(), nn.MaxPool2d(2)
    convolutions = [nn.Conv2d(before, after, 3, padding=1) for before, after in ((3, 8), (8, 8), (8, 16))]
    layers = [layer for convolution in convolutions for layer in (convolution, relu, pool)]
    net = localize(nn.Sequential(*layers, nn.Flatten(), nn.Linear(64, 5)), 5, image_shape=(3, 16, 16))
    assert [stage.layers for stage in net.stages] == ["Conv2d, ReLU"] * 3
    assert [stage.features for stage in net.stages] == [(8, 16, 16), (8, 8, 8), (16, 4, 4)]
    assert net.dropped == "MaxPool2d, Flatten (9), Linear (10)"
    train_step(net, torch.randn(4, 3, 16, 16), torch.randint(5, (4,)), "interleaved")


def test_a_pool_behind_a_norm_stays_behind_it() -> None:
    given = nn.Sequential(
        *(nn.Conv2d(3, 8, 3), nn.MaxPool2d(2), nn.GroupNorm(2, 8), nn.AvgPool2d(2), nn.Conv2d(8, 8, 3)),
    )
    net = localize(given, 5, image_shape=(3, 16, 16))
    assert net.stages[1].layers == "GroupNorm, AvgPool2d, Conv2d"


def test_any_activation_may_stand_in_the_head() -> None:
    head = (nn.Flatten(), nn.Linear(8 * 14 * 14, 9), nn.Tanh(), nn.Linear(9, 5), nn.Sigmoid())
    net = localize(nn.Sequential(nn.Conv2d(3, 8, 3), *head), 5, image_shape=(3, 16, 16))
    assert net.dropped == "Flatten (1), Linear (2), Tanh (3), Linear (4), Sigmoid (5)"


def test_the_example_learns_the_digits(capsys: pytest.CaptureFixture[str]) -> None:
    names = runpy.run_path(str(EXAMPLE))
    accuracy = names["main"](["--epochs", "2"])
    assert accuracy > 90
    assert "unit 3, stage 5: Residual" in capsys.readouterr().out
