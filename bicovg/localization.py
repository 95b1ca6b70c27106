"""Bring your own network: cut a sequence of convolutional stages into units with goodness and readouts.

A stage is a child of the ``nn.Sequential`` that holds a convolution, with the norms and activations behind it; that
is where goodness looks. Pools and dropout behind those carry the features to the next stage, without a gradient where
a unit ends, and RMSNorm closes every stage, so that no stage can read the energy of the one before. What stands
behind the last convolution's stage (global pool, flatten, linear) is dropped: every unit has a readout of its own.
"""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from bicovg.backbones import unit_sizes
from bicovg.blocks import Block, Unit
from bicovg.goodness import BiCovG, Readout
from bicovg.layers import FeatureAlignment
from bicovg.networks import LocalNetwork

CONVOLUTIONS = (nn.Conv2d, nn.ConvTranspose2d)
NORMS = (nn.BatchNorm2d, nn.GroupNorm, nn.InstanceNorm2d, nn.LocalResponseNorm, nn.Identity)
ACTIVATIONS = tuple(
    getattr(nn, name) for name in ("ReLU", "ReLU6", "LeakyReLU", "PReLU", "ELU", "GELU", "SiLU", "Hardswish", "Mish")
)
POOLS = (nn.MaxPool2d, nn.AvgPool2d, nn.LPPool2d, nn.ZeroPad2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d)
DROPOUTS = (nn.Dropout, nn.Dropout2d)
HEADS = (nn.Flatten, nn.Linear, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d, *DROPOUTS, *ACTIVATIONS, nn.Softmax)
SCALES = ((2, 4), (1, 2), (1,))


@dataclass
class Draft:
    """One stage before it becomes a module: what computes f, and what carries f on."""

    name: str
    body: list[nn.Module] = field(default_factory=list)
    tail: list[nn.Module] = field(default_factory=list)
    dropout: float = 0.0


@dataclass(frozen=True)
class StageReport:
    """What became of one stage."""

    name: str
    unit: int
    layers: str
    features: tuple[int, int, int]
    goodness: int | None
    notes: tuple[str, ...]

    def __str__(self) -> str:
        C, H, W = self.features
        judged = f"goodness of {self.goodness} values and a readout" if self.goodness else "no exit"
        text = f"unit {self.unit}, stage {self.name}: {self.layers}; f is {C}x{H}x{W}; {judged}"
        return "; ".join([text, *self.notes])


class Stage(Block):
    """A block whose f is computed by layers of another network."""

    def __init__(
        self, index: int, draft: Draft, goodness: BiCovG | None, classes: int, alignment: FeatureAlignment | None
    ) -> None:
        nn.Module.__init__(self)
        self.index, self.pool, self.dropout = index, False, draft.dropout
        self.alignment = alignment
        self.body = nn.Sequential(*draft.body)
        self.tail = nn.Sequential(*draft.tail)
        self.norm = None
        self.goodness = goodness
        self.readout = Readout(goodness.dim, classes) if goodness is not None else None
        self.recomputing = False
        self.begins_in_place = bool(getattr(draft.body[0], "inplace", False))

    def convolve(self, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b d p q"]:
        x = x.clone() if self.begins_in_place else x
        f: Tensor = self.body(x if self.alignment is None else self.alignment(x))
        return f

    def features(self, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b d p q"]:
        return self.convolve(x)

    def activate(self, y: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c h w"]:
        return y

    def emit(self, f: Float[Tensor, "b c h w"], keys: Int[Tensor, " b"] | None) -> Float[Tensor, "b c p q"]:
        return super().emit(self.tail(f), keys)


class LocalizedNetwork(LocalNetwork):
    """A network cut by ``localize``; ``report`` says stage by stage what was done."""

    def __init__(self, units: Sequence[nn.Module], stages: Sequence[StageReport], dropped: str) -> None:
        super().__init__(units)
        self.stages, self.dropped = tuple(stages), dropped

    def report(self) -> str:
        """One line per stage, and one for what was dropped."""
        lines = [str(stage) for stage in self.stages]
        return "\n".join([*lines, f"dropped: {self.dropped}"] if self.dropped else lines)


def localize(
    network: nn.Sequential,
    num_classes: int,
    *,
    scope: str = "strict",
    group_size: int = 1,
    groups: Sequence[int] | None = None,
    image_shape: tuple[int, int, int] = (3, 32, 32),
    reduction: int = 8,
    cross_channel: bool = True,
    alignment: Sequence[int] = (),
) -> LocalizedNetwork:
    """Turn a sequence of convolutional stages into units trained locally. The given network is copied, not changed.

    Args:
        scope: ``strict`` (every stage a unit), ``grouped`` with ``groups``, ``hgb`` with ``group_size``, or
            ``end-to-end``.
        image_shape: channels, height and width of the images.
        reduction: channels per cross-channel projection; it must divide every stage's channels.
        alignment: indices of the stages that get a FAL at their entrance.

    Raises:
        ValueError: where the network cannot be cut, with the stage and the reason.
    """
    check_network(network)
    drafts, dropped = split_stages(copy.deepcopy(network))
    check_sharing(drafts)
    check_numbers(num_classes, alignment, len(drafts))
    sizes = unit_sizes(len(drafts), scope, group_size, groups)
    ends = {sum(sizes[: i + 1]) - 1 for i in range(len(sizes))}
    shapes = list(trace_shapes(drafts, image_shape))
    stages: list[Stage] = []
    reports: list[StageReport] = []
    for index, (draft, (inputs, features)) in enumerate(zip(drafts, shapes, strict=True)):
        exits = index in ends or scope == "grouped"
        goodness = make_goodness(draft.name, features, reduction, cross_channel) if exits else None
        fal = FeatureAlignment(inputs[0]) if index in alignment else None
        stages.append(Stage(index, draft, goodness, num_classes, fal))
        unit = sum(end < index for end in ends)
        reports.append(describe(draft, unit, features, goodness, fal is not None))
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    units = [Unit(stages[start : start + size]) for start, size in zip(starts, sizes, strict=True)]
    return LocalizedNetwork(units, reports, dropped)


def check_network(network: nn.Module) -> None:
    """Refuse a network whose layers are not computed one after the other, or have no weights yet."""
    kind, repair = type(network).__name__, "give nn.Sequential(stem, stage1, stage2, ...)"
    if not isinstance(network, nn.Sequential):
        raise ValueError(f"{kind} is not an nn.Sequential, so its order of stages is unknown: {repair}")
    if type(network).forward is not nn.Sequential.forward or "forward" in vars(network):
        raise ValueError(f"{kind} has a forward of its own, so its order of stages is unknown: {repair}")
    for name, parameter in network.named_parameters(remove_duplicate=False):
        if is_lazy(parameter):
            layer = network.get_submodule(name.rpartition(".")[0])
            raise ValueError(
                f"layer {name.rpartition('.')[0]} ({type(layer).__name__}) has no weights yet: "
                "pass a batch of images through the network first"
            )


def check_numbers(num_classes: int, alignment: Sequence[int], stages: int) -> None:
    if type(num_classes) is not int or num_classes < 2:
        raise ValueError(f"num_classes {num_classes} is out of range: it must be a whole number of at least 2")
    unknown = [index for index in alignment if index not in range(stages)]
    if unknown:
        raise ValueError(f"alignment names the stage {unknown[0]}: there are the stages 0 to {stages - 1}")


def split_stages(network: nn.Sequential) -> tuple[list[Draft], str]:
    """Stages in order, and the names of the layers behind the last that were left out."""
    drafts: list[Draft] = []
    leading: list[nn.Module] = []
    dropped: list[str] = []
    for name, layer in network._modules.items():  # named_children would leave out a layer's second use
        assert layer is not None
        kind = type(layer).__name__
        if _has(layer, CONVOLUTIONS):
            if dropped:
                raise ValueError(f"stage {name} ({kind}) follows {dropped[-1]}: only the network's end may hold a head")
            drafts.append(Draft(name, [*leading, layer]))
            leading = []
        elif isinstance(layer, nn.Flatten | nn.Linear) or (dropped and (isinstance(layer, HEADS) or _activates(layer))):
            dropped.append(f"{kind} ({name})")
        elif isinstance(layer, NORMS + ACTIVATIONS) and not (drafts and drafts[-1].tail):
            (drafts[-1].body if drafts else leading).append(layer)
        elif isinstance(layer, NORMS + ACTIVATIONS):
            leading.append(layer)  # behind a pool: it opens the next stage
        elif drafts and isinstance(layer, DROPOUTS):
            drafts[-1].dropout = max(drafts[-1].dropout, layer.p)
        elif isinstance(layer, POOLS):
            (leading if leading or not drafts else drafts[-1].tail).append(layer)
        elif _activates(layer):
            known = ", ".join(known.__name__ for known in ACTIVATIONS)
            raise ValueError(
                f"layer {name} ({kind}) is no activation that goodness is made for, the energy of features behind a "
                f"ReLU or a relative of it: use one of {known}"
            )
        else:
            raise ValueError(
                f"layer {name} ({kind}) is no convolutional stage, norm, activation or pool: it cannot be cut"
            )
    if not drafts:
        raise ValueError("the network has no convolution: there is nothing to cut into stages")
    unused = [type(layer).__name__ for layer in (*drafts[-1].tail, *leading)]
    drafts[-1].tail, drafts[-1].dropout = [], 0.0
    return drafts, ", ".join([*unused, *dropped])


def _has(layer: nn.Module, kinds: tuple[type, ...]) -> bool:
    return any(isinstance(module, kinds) for module in layer.modules())


def _activates(layer: nn.Module) -> bool:
    return type(layer).__module__ == nn.ReLU.__module__


def check_sharing(drafts: Sequence[Draft]) -> None:
    """A weight in two stages would carry one stage's loss into the other, a running mean its features."""
    owners: dict[int, Draft] = {}
    for draft in drafts:
        layers = nn.ModuleList([*draft.body, *draft.tail])
        for what, found in (("a weight", layers.parameters()), ("running statistics", layers.buffers())):
            for tensor in found:
                owner = owners.setdefault(id(tensor), draft)
                if owner is not draft:
                    raise ValueError(f"stages {owner.name} and {draft.name} share {what}: give each its own")


def trace_shapes(
    drafts: Sequence[Draft], image_shape: tuple[int, int, int]
) -> Iterator[tuple[tuple[int, ...], tuple[int, int, int]]]:
    """Shape of the input and of f, per stage, found by passing shapes alone."""
    x = torch.empty(2, *image_shape, device="meta")
    for draft in drafts:
        body = copy.deepcopy(nn.Sequential(*draft.body)).to("meta").eval()
        tail = copy.deepcopy(nn.Sequential(*draft.tail)).to("meta").eval()
        inputs = tuple(x.shape[1:])
        try:
            with torch.no_grad():
                f = body(x)
                x = tail(f)
        except Exception as error:  # the layers are not ours
            reason = str(error).partition("\n")[0] or type(error).__name__
            raise ValueError(
                f"stage {draft.name} does not accept a {'x'.join(map(str, inputs))} input: {reason}"
            ) from None
        for value in (f, x):
            if not isinstance(value, Tensor) or value.dim() != 4:
                got = f"{tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
                raise ValueError(f"stage {draft.name} gives {got}, not a batch of feature maps: it cannot be cut there")
        yield inputs, (f.shape[1], f.shape[2], f.shape[3])


def make_goodness(name: str, features: tuple[int, int, int], reduction: int, cross_channel: bool) -> BiCovG:
    """BiCovG for a stage: scales (2, 4) on maps of few channels, (1, 2) elsewhere, (1,) on a single pixel."""
    C, H, W = features
    fitting = [scales for scales in SCALES if max(scales) <= min(H, W)]
    scales = next(s for s in fitting if s != (2, 4) or C <= 128)
    try:
        return BiCovG(C, scales, reduction, cross_channel)
    except ValueError as error:
        raise ValueError(f"stage {name}: {error}") from None


def describe(
    draft: Draft, unit: int, features: tuple[int, int, int], goodness: BiCovG | None, aligned: bool
) -> StageReport:
    """The report of one stage."""
    notes = [f"carried on by {', '.join(type(layer).__name__ for layer in draft.tail)}"] if draft.tail else []
    if goodness is not None:
        notes.insert(0, f"scales {goodness.scales}")
    if draft.dropout:
        notes.append(f"dropout {draft.dropout:g} made keyed")
    if aligned:
        notes.append("FAL at its entrance")
    if any(_has(layer, DROPOUTS) for layer in draft.body):
        notes.append("dropout inside draws from torch's generator, so a resumed run differs")
    layers = ", ".join(type(layer).__name__ for layer in draft.body)
    return StageReport(draft.name, unit, layers, features, goodness.dim if goodness else None, tuple(notes))
