"""The kernels at a block's entrance against float64, at every recipe's shapes: the image's convolution, FAL's sums."""

from typing import NamedTuple

import torch
from kernel_blocks import DEVICE, LAST, recipes
from kernel_checks import Distance, cut_rows, distance, poisoned
from torch.nn import functional as F
from torch.nn.grad import conv2d_weight

from bicovg.kernels.borders import border_sums_op
from bicovg.kernels.image import fits_image, image_conv_op, image_conv_weight_op
from bicovg.offsets import border_sums
from bicovg.roofline import trace_layers

IMAGE, BORDERS = "image convolution", "border sums"
SUMS_LIMIT = 3e-5  # in both types: sums are float32, of numbers that are exact, and of up to 3,136 of them


class Edge(NamedTuple):
    recipe: str
    kind: str
    batch: int
    before: int  # channels of the convolution's input
    channels: int
    size: int

    def __str__(self) -> str:
        return f"{self.recipe:9} {self.kind}, B{self.batch} C{self.channels} {self.size}x{self.size}"


def recipe_edges() -> list[Edge]:
    """Each shape of a recipe's first convolution once, and each of a convolution behind a FAL."""
    found: dict[tuple[object, ...], Edge] = {}
    for name, config in recipes():
        for layer in trace_layers(config):
            for kind, here in ((IMAGE, layer.index == 0), (BORDERS, layer.aligned and not layer.differentiated)):
                edge = Edge(name, kind, config.train.batch_size, layer.before, layer.channels, layer.side)
                shape = edge[3:] if kind == IMAGE else edge[4:]
                if here:
                    found.setdefault((kind, *shape), edge)
    return list(found.values())


def check_edge(edge: Edge, dtype: torch.dtype) -> dict[str, float]:
    """Relative errors of what the kernel makes, and of the worst sample."""
    shape = (edge.batch, edge.channels, edge.size, edge.size)
    dy = torch.randn(shape, device=DEVICE).to(dtype).contiguous(memory_format=LAST)
    return check_borders(dy) if edge.kind == BORDERS else check_image(dy, edge.before)


def check_borders(dy: torch.Tensor) -> dict[str, float]:
    with poisoned():
        sums = border_sums_op(dy)
    gathered = Distance()
    for rows in cut_rows(dy):
        gathered.add(sums[rows], border_sums(dy[rows].double()))
    return gathered.values("sums")


def check_image(dy: torch.Tensor, before: int) -> dict[str, float]:
    x = torch.randn(len(dy), before, *dy.shape[2:], device=DEVICE).to(dy.dtype).contiguous(memory_format=LAST)
    weight = torch.randn(dy.shape[1], before, 3, 3, device=DEVICE).to(dy.dtype)
    assert fits_image(x, weight), "training takes another way"
    with poisoned():
        y, dw = image_conv_op(x, weight), image_conv_weight_op(dy, x)
    gathered, total = Distance(), torch.zeros_like(weight, dtype=torch.float64)
    for rows in cut_rows(dy):
        gathered.add(y[rows], F.conv2d(x[rows].double(), weight.double(), padding=1))
        total += conv2d_weight(x[rows].double(), weight.shape, dy[rows].double(), padding=1)
    return gathered.values("y") | {"dW": distance(dw, total)}
