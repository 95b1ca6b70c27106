"""Networks of units: vgg8, vgg16, the general builder behind them, and the classic VGG-16 baseline.

Scope (where the graph is cut) and groups (where a FAL stands) are separate settings:

========== ============================ ============================ ========
scope      graph cut                    losses                       BP-free
========== ============================ ============================ ========
strict     before every block           one per block                yes
grouped    at group boundaries          one per block                no
hgb        every ``group_size`` blocks  one per unit, at its end     no
end-to-end nowhere                      the last block's, or all's   no
========== ============================ ============================ ========
"""

from collections.abc import Callable, Sequence
from itertools import accumulate, islice, pairwise

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from bicovg.backbones import VGG8, VGG16, Backbone, group_starts, unit_sizes
from bicovg.blocks import Block, Unit
from bicovg.draws import make_keys
from bicovg.goodness import BiCovG
from bicovg.layers import FeatureAlignment, check_dropout, keyed_dropout
from bicovg.signals import Credit, loss_credit


class LocalNetwork(nn.Module):
    """Units in sequence. ``net(images)`` gives the logits of every exit, (E, B, K); it never sees labels.

    Args:
        units: modules with ``forward(x, keys, emit)``, ``learn(x, labels, keys, emit)`` and ``exits``.
        stem: side of the average pool on the input image; 1 for none.
        hands_on: whether the last unit emits its output, for a network that goes on elsewhere.
    """

    def __init__(self, units: Sequence[nn.Module], stem: int = 1, hands_on: bool = False) -> None:
        super().__init__()
        self.hands_on = hands_on
        self.units = nn.ModuleList(units)
        self.stem = stem
        self.exits: list[int] = [index for unit in units for index in unit.exits]  # type: ignore[union-attr]

    def prepare(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c p q"]:
        """The first unit's input."""
        return F.avg_pool2d(images, self.stem) if self.stem > 1 else images

    def sample_keys(self, images: Float[Tensor, "b c h w"]) -> Int[Tensor, " b"] | None:
        """Dropout keys from the generator, for loops that bring none of their own."""
        if not self.training:
            return None
        return torch.randint(2**62, (len(images),), device=images.device)

    def forward(
        self, images: Float[Tensor, "b c h w"], keys: Int[Tensor, " b"] | None = None
    ) -> Float[Tensor, "e b k"]:
        x, keys = self.prepare(images), self.sample_keys(images) if keys is None else keys
        logits: list[Tensor] = []
        for index, unit in enumerate(self.units):
            x, judged = unit(x, keys, emit=index + 1 < len(self.units))
            logits += judged
        return torch.stack(logits)


def local_network(
    num_classes: int,
    channels: Sequence[int],
    pools: Sequence[int] = (),
    scales: Sequence[tuple[int, ...]] | None = None,
    *,
    in_channels: int = 3,
    scope: str = "strict",
    group_size: int = 1,
    groups: Sequence[int] | None = None,
    alignment: bool | Sequence[int] = False,
    exits: str = "last",
    width: float = 1.0,
    batch_norm: bool = True,
    dropout: float = 0.1,
    reduction: int = 8,
    cross_channel: bool = True,
    multi_scale: bool = True,
    hidden: int = 512,
    stem: int = 1,
    checkpointing: bool = False,
) -> LocalNetwork:
    """Build a network of any depth, width, pool and scale list.

    Args:
        channels: one entry per block.
        pools: indices of the blocks followed by RMSPool.
        scales: one tuple of grid scales per block; None means (1, 2) everywhere.
        scope: ``strict``, ``grouped``, ``hgb`` or ``end-to-end``.
        group_size: blocks per unit for ``hgb``.
        groups: block counts of the groups; a FAL stands at each group's entrance but the first.
        alignment: True for the standard FAL places, or the indices of the blocks that get one.
        exits: for ``end-to-end``: ``last`` or ``all`` (deep supervision).
        width: multiplies every channel count.
        cross_channel, multi_scale: the ablation's switches; without multi_scale every block uses scale 1 alone.
    """
    sizes = unit_sizes(len(channels), scope, group_size, groups)
    places = group_starts(len(channels), scope, sizes, groups) if alignment is True else tuple(alignment or ())
    widths = [int(c * width) for c in channels]
    grids = [(1, 2)] * len(widths) if scales is None else [tuple(grid) for grid in scales]
    _check_layout(widths, grids, pools, places, exits)
    all_judged = scope == "grouped" or (scope == "end-to-end" and exits == "all")
    ends = {end - 1 for end in accumulate(sizes)}
    blocks = []
    for index, (before, after) in enumerate(pairwise([in_channels, *widths])):
        judged = all_judged or index in ends
        grid = grids[index] if multi_scale else (1,)
        blocks.append(
            Block(
                index,
                before,
                after,
                pool=index in pools,
                dropout=dropout,
                batch_norm=batch_norm,
                num_classes=num_classes,
                goodness=_goodness(index, after, grid, reduction, cross_channel) if judged else None,
                alignment=FeatureAlignment(before, hidden) if index in places else None,
            )
        )
    rest = iter(blocks)
    return LocalNetwork([Unit(list(islice(rest, size)), checkpointing) for size in sizes], stem)


def _check_layout(
    widths: Sequence[int], grids: Sequence[tuple[int, ...]], pools: Sequence[int], places: Sequence[int], exits: str
) -> None:
    depth = len(widths)
    if not widths or min(widths) < 1:
        raise ValueError(
            f"channels {tuple(widths)} leave a block without channels: give each at least 1, or more width"
        )
    if len(grids) != depth:
        raise ValueError(f"{len(grids)} scale tuples for {depth} blocks: give one per block")
    for name, indices in (("pools", pools), ("alignment", places)):
        if any(not 0 <= index < depth for index in indices):
            raise ValueError(f"{name} {tuple(indices)} must be block indices between 0 and {depth - 1}")
    if exits not in ("last", "all"):
        raise ValueError(f"exits {exits!r} is unknown: choose last or all")


def _goodness(index: int, channels: int, scales: tuple[int, ...], reduction: int, cross_channel: bool) -> BiCovG:
    try:
        return BiCovG(channels, scales, reduction, cross_channel)
    except ValueError as error:
        raise ValueError(f"block {index}: {error}") from None


def _from_backbone(num_classes: int, backbone: Backbone, options: dict[str, object]) -> LocalNetwork:
    settings = {**backbone.as_arguments(), **options}
    return local_network(num_classes, **settings)  # type: ignore[arg-type]


def vgg8(num_classes: int, **options: object) -> LocalNetwork:
    """The paper's 8-block backbone (CIFAR-100); options as in ``local_network``."""
    return _from_backbone(num_classes, VGG8, options)


def vgg16(num_classes: int, **options: object) -> LocalNetwork:
    """The paper's 16-block backbone (Tiny-ImageNet, ImageNet-100 with ``stem=2``); options as in ``local_network``."""
    return _from_backbone(num_classes, VGG16, options)


class ClassicVGG16(nn.Module):
    """The standard 13-convolution VGG-16 with its 4096-4096 head, as one unit: the paper's BP row."""

    CHANNELS = (64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512)
    POOLS = (1, 3, 6, 9, 12)

    def __init__(self, num_classes: int, in_channels: int = 3, width: float = 1.0, dropout: float = 0.5) -> None:
        super().__init__()
        widths = [int(c * width) for c in self.CHANNELS]
        self.convs = nn.ModuleList(
            nn.Conv2d(before, after, 3, padding=1)
            for before, after in zip([in_channels, *widths[:-1]], widths, strict=True)
        )
        hidden = int(4096 * width)
        self.head = nn.ModuleList(
            [nn.Linear(widths[-1] * 49, hidden), nn.Linear(hidden, hidden), nn.Linear(hidden, num_classes)]
        )
        self.dropout = check_dropout(dropout)
        self.exits = [len(widths) - 1]
        self._initialise()

    def _initialise(self) -> None:
        """As this net is usually begun; by PyTorch's default every convolution would hand on a sixth of the mean square
        that it reads, and without a norm the net would hardly learn.
        """
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif name.startswith("convs"):
                nn.init.kaiming_normal_(parameter, mode="fan_out", nonlinearity="relu")
            else:
                nn.init.normal_(parameter, std=0.01)

    def forward(
        self, x: Float[Tensor, "b c h w"], keys: Int[Tensor, " b"] | None = None, emit: bool = True
    ) -> tuple[None, list[Float[Tensor, "b k"]]]:
        for index, conv in enumerate(self.convs):
            x = F.relu(conv(x))
            if index in self.POOLS:
                x = F.max_pool2d(x, 2)
        z = F.adaptive_avg_pool2d(x, 7).flatten(1)
        *hidden, last = self.head
        for index, layer in enumerate(hidden):
            z = F.relu(layer(z))
            if self.training and self.dropout:
                assert keys is not None
                z = keyed_dropout(z, self.dropout, make_keys(keys, len(self.convs) + index))
        return None, [last(z)]

    def learn(
        self,
        x: Float[Tensor, "b c h w"],
        labels: Int[Tensor, " b"],
        keys: Int[Tensor, " b"] | None = None,
        emit: bool = True,
    ) -> Credit:
        _, logits = self(x, keys, emit)
        return loss_credit(None, [F.cross_entropy(logits[0].float(), labels)])


def vgg16_classic(num_classes: int, in_channels: int = 3, width: float = 1.0, dropout: float = 0.5) -> LocalNetwork:
    """The classic VGG-16 (134,670,244 parameters at 100 classes): end-to-end, one exit."""
    return LocalNetwork([ClassicVGG16(num_classes, in_channels, width, dropout)])


def count_parameters(net: nn.Module) -> int:
    """Trainable parameters."""
    return sum(p.numel() for p in net.parameters() if p.requires_grad)


def dry_run(build: Callable[[], LocalNetwork], image_shape: tuple[int, int, int]) -> LocalNetwork:
    """Build on the meta device and pass shapes alone through it; a misfit raises ValueError naming its block."""
    with torch.device("meta"), torch.no_grad():
        net = build()
        check_pools(net, min(image_shape[1:]))
        try:
            net.eval()(torch.empty(2, *image_shape))
        except RuntimeError as error:
            first = str(error).splitlines()[0]
            raise ValueError(f"the network does not fit images of shape {image_shape}: {first}") from None
    return net


def check_pools(net: LocalNetwork, side: int) -> None:
    """Every pool needs a map of at least 2x2."""
    side //= net.stem
    for block in (module for module in net.modules() if isinstance(module, Block)):
        if block.pool and side < 2:
            raise ValueError(f"block {block.index}: RMSPool needs a map of at least 2x2 and it has {side}x{side}")
        side = side // 2 if block.pool else side
