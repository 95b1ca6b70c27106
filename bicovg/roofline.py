"""How fast a training step could be: multiply-adds and bytes of every pass over the data. No torch.

A step is a list of passes. A pass does some multiply-adds and moves some bytes, each tensor once per pass; it takes
at least ``max(2 * MACs / peak FLOP/s, bytes / bandwidth)``, and the passes of one step run one after the other. What
is counted is what the method needs: a strict block needs no input gradient, and a FAL needs only the input gradient
of a spatially constant offset, which is nearly free.

Legend: C channels, X, F and H the elements of a block's input, of its activations f and of its output h, per image.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from bicovg.backbones import group_starts, unit_sizes
from bicovg.config import Config, ModelConfig

HIDDEN = 512  # of a FAL
CLASSIC_CHANNELS = (64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512)
CLASSIC_POOLS = (1, 3, 6, 9, 12)
CLASSIC_HEAD = 4096
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2}
OPTIMIZER_BYTES = {"sgd": 20, "adamw": 28}  # float32 parameter, gradient and moments in, parameter and moments out


@dataclass(frozen=True)
class Peak:
    """A device's limits: dense bfloat16 FLOP/s and memory bytes/s, from its data sheet."""

    flops: float
    bandwidth: float


PEAKS = {"H200": Peak(989e12, 4.8e12)}


@dataclass(frozen=True)
class Pass:
    """One pass over one image's data. ``block`` is None for what belongs to no block."""

    name: str
    block: int | None
    macs: int
    bytes: float


@dataclass(frozen=True)
class Layer:
    """A block's place in the network, as the layer tables and the scope fix it."""

    index: int
    before: int
    channels: int
    side: int
    side_after: int
    goodness: int  # dimension D of its goodness; 0 where the block is no exit
    projections: int
    aligned: bool
    inner: bool  # another block of the same unit follows
    differentiated: bool  # its unit has an earlier block, so its input needs a gradient

    @property
    def inputs(self) -> int:
        return self.before * self.side**2

    @property
    def features(self) -> int:
        return self.channels * self.side**2

    @property
    def outputs(self) -> int:
        return self.channels * self.side_after**2

    @property
    def conv_macs(self) -> int:
        return 9 * self.before * self.features


def find_peak(gpu: str | None, precision: str) -> Peak | None:
    """The limits of a GPU by its name; None where they are not known, or for another precision than bfloat16."""
    if gpu is None or precision != "bfloat16":
        return None
    return next((peak for word, peak in PEAKS.items() if word in gpu.split()), None)


def trace_layers(config: Config) -> list[Layer]:
    """Every block of a BiCovG network with its map sizes, exits and FALs."""
    model, depth = config.model, len(config.model.channels)
    sizes = unit_sizes(depth, model.scope, model.group_size, model.groups)
    firsts = {sum(sizes[:i]) for i in range(len(sizes))}
    places = group_starts(depth, model.scope, sizes, model.groups) if model.alignment else ()
    layers, side, before = [], config.data.image_size // model.stem, config.data.image_channels
    for index in range(depth):
        channels = int(model.channels[index] * model.width)
        last = index + 1 in firsts or index + 1 == depth
        exits = last or model.scope == "grouped" or (model.scope == "end-to-end" and model.exits == "all")
        projections = channels // model.reduction if exits and model.cross_channel else 0
        scales = model.scales[index] if model.multi_scale else (1,)
        after = side // 2 if index in model.pools else side
        layers.append(
            Layer(
                index,
                before,
                channels,
                side,
                after,
                goodness=sum(s * s for s in scales) * (channels + projections) if exits else 0,
                projections=projections,
                aligned=index in places,
                inner=not last,
                differentiated=index not in firsts,
            )
        )
        before, side = channels, after
    return layers


def block_passes(layer: Layer, model: ModelConfig, classes: int, size: int, emits: bool) -> Iterator[Pass]:
    """The passes of one block; ``size`` is the bytes of an element, ``emits`` whether another block follows it."""
    X, F, H = layer.inputs, layer.features, layer.outputs

    def make(name: str, macs: int, elements: int) -> Pass:
        return Pass(name, layer.index, macs, elements * size)

    times = 2 if model.checkpointing and layer.inner else 1  # a checkpointed block goes forward twice
    judging = layer.projections * F + layer.goodness * classes
    for _ in range(times):
        if layer.aligned:
            yield make("alignment", 2 * layer.before * HIDDEN, 2 * X)
        yield make("convolution", layer.conv_macs, X + F)
        yield make("norm, ReLU, goodness", judging, 2 * F)
        if emits:
            yield make("pool, dropout, RMSNorm", 0, F + H)
    if layer.goodness:
        yield make("goodness backward", 2 * judging, 2 * F)
    if layer.inner:
        yield make("pool, dropout, RMSNorm backward", 0, 2 * F + H)
    yield make("norm backward", 0, 3 * F)
    yield make("weight gradient", layer.conv_macs, X + F)
    if layer.differentiated:
        yield make("input gradient", layer.conv_macs, X + F)
    if layer.aligned:
        yield make("alignment backward", 4 * layer.before * HIDDEN, 0)


def classic_passes(config: Config, size: int) -> Iterator[Pass]:
    """The 13-convolution VGG-16 with its head, end to end."""
    model, side, before = config.model, config.data.image_size, config.data.image_channels
    for index, base in enumerate(CLASSIC_CHANNELS):
        channels, pooled = int(base * model.width), index in CLASSIC_POOLS
        X, F, H = before * side**2, channels * side**2, channels * (side // 2) ** 2
        macs = 9 * before * F
        yield Pass("convolution, ReLU", index, macs, (X + F) * size)
        yield Pass("weight gradient", index, macs, (X + F) * size)
        yield Pass("ReLU backward", index, 0, 3 * F * size)
        if index:
            yield Pass("input gradient", index, macs, (X + F) * size)
        if pooled:
            yield Pass("pool", index, 0, (F + H) * size)
            yield Pass("pool backward", index, 0, (2 * F + H) * size)
        before, side = channels, side // 2 if pooled else side
    for inputs, outputs in classic_head(config):
        yield Pass("head", None, 3 * inputs * outputs, 3 * (inputs + outputs) * size)


def classic_head(config: Config) -> list[tuple[int, int]]:
    """(inputs, outputs) of the three linear layers."""
    hidden = int(CLASSIC_HEAD * config.model.width)
    first = 49 * int(CLASSIC_CHANNELS[-1] * config.model.width)
    return [(first, hidden), (hidden, hidden), (hidden, config.data.num_classes)]


def step_passes(config: Config) -> list[Pass]:
    """Every pass of a training step, per image; the optimizer's traffic is shared out over the batch."""
    size, data = ELEMENT_BYTES[config.train.precision], config.data
    pixels = data.image_channels * data.image_size**2
    passes = [Pass("augmentation", None, 0, pixels * (1 + 4))]  # uint8 in, float32 out
    if config.model.method == "classic":
        passes += classic_passes(config, size)
    else:
        layers = trace_layers(config)
        for layer in layers:
            passes += block_passes(layer, config.model, data.num_classes, size, layer is not layers[-1])
    traffic = count_parameters(config) * OPTIMIZER_BYTES[config.optim.name]
    return [*passes, Pass("optimizer", None, 0, traffic / config.train.batch_size)]


def count_parameters(config: Config) -> int:
    """Trainable parameters, from the tables."""
    if config.model.method == "classic":
        widths = [int(c * config.model.width) for c in CLASSIC_CHANNELS]
        pairs = zip([config.data.image_channels, *widths[:-1]], widths, strict=True)
        return sum((9 * a + 1) * b for a, b in pairs) + sum((a + 1) * b for a, b in classic_head(config))
    total = 0
    for layer in trace_layers(config):
        total += layer.channels * (9 * layer.before + (2 if config.model.batch_norm else 1))
        total += layer.projections * layer.channels
        total += (layer.goodness + 1) * config.data.num_classes if layer.goodness else 0
        total += 2 * layer.before * HIDDEN if layer.aligned else 0
    return total


def count_macs(config: Config) -> int:
    """Multiply-adds of one training step, per image."""
    return sum(item.macs for item in step_passes(config))


def count_bytes(config: Config) -> float:
    """Bytes one training step must move, per image."""
    return sum(item.bytes for item in step_passes(config))


def speed_limit(config: Config, peak: Peak) -> float:
    """Images per second that no implementation of these passes can exceed on a device with these limits."""
    seconds = sum(max(2 * item.macs / peak.flops, item.bytes / peak.bandwidth) for item in step_passes(config))
    return 1 / seconds


def describe_roofline(config: Config, gpu: str | None, images_per_second: float | None) -> dict[str, float | None]:
    """A benchmark row's share of what the device allows; null where the device's limits are not known."""
    macs, peak = count_macs(config), find_peak(gpu, config.train.precision)
    found: dict[str, float | None] = {
        "gmac_per_image": macs / 1e9,
        "megabytes_per_image": count_bytes(config) / 1e6,
        "limit_images_per_second": speed_limit(config, peak) if peak else None,
        "share": None,
        "flops_share": None,
    }
    if peak and images_per_second:
        found["share"] = images_per_second / speed_limit(config, peak)
        found["flops_share"] = images_per_second * 2 * macs / peak.flops
    return found
