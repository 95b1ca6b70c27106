"""Goodness: from a block's activations f to the vector its readout classifies.

Paper: "Covariance-Aware Goodness for Scalable Forward-Forward Learning", section 3.2 (BiCovG).
Legend: B batch, C channels, H W map, s grid scale, N = C / r projections, D goodness dimension.

Deviation from common practice: cells never overlap. Cell i starts at floor(i * H / s); adaptive pooling would
overlap its cells at 7x7, s = 2, which is not the paper's partition.
"""

import math
from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F


def widen(x: Tensor) -> Tensor:
    """At least float32: squares of bfloat16 would lose most of their bits. float64 stays float64."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def transformed() -> bool:
    """Whether ``torch.func`` or forward-mode differentiation is at work: both differentiate what no tensor says."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def cell_bounds(size: int, scale: int) -> list[tuple[int, int]]:
    """First and past-last index of each of ``scale`` cells that tile ``size`` without overlap."""
    edges = [i * size // scale for i in range(scale + 1)]
    return list(pairwise(edges))


def mean_cells(x: Float[Tensor, "b c h w"], scale: int) -> Float[Tensor, "b c s s"]:
    """Mean over each cell of the scale x scale grid."""
    B, C, H, W = x.shape
    if not 1 <= scale <= min(H, W):
        raise ValueError(f"scale {scale} does not fit a {H}x{W} map: use a scale between 1 and {min(H, W)}")
    if scale == 1:
        return x.mean(dim=(2, 3), keepdim=True)
    if H % scale == 0 and W % scale == 0:
        return x.reshape(B, C, scale, H // scale, scale, W // scale).mean(dim=(3, 5))
    rows = [x[:, :, top:end].mean(dim=2) for top, end in cell_bounds(H, scale)]
    strip = torch.stack(rows, dim=2)  # (B, C, s, W)
    return torch.stack([strip[..., left:end].mean(dim=3) for left, end in cell_bounds(W, scale)], dim=3)


def spatial_energy(f: Float[Tensor, "b c h w"], scale: int) -> Float[Tensor, "b d"]:
    """Per-channel spatial energy, (B, C * s * s), channel-major, then row, then column.

    ``g[b, c, i, j] = mean over cell (i, j) of f[b, c, h, w]^2``
    """
    return mean_cells(widen(f).square(), scale).flatten(1)


def project_channels(f: Float[Tensor, "b c h w"], weight: Float[Tensor, "n c"]) -> Float[Tensor, "b n h w"]:
    """``p[b, k, h, w] = sum_c weight[k, c] f[b, c, h, w]``: a 1x1 convolution."""
    return F.conv2d(f, weight[:, :, None, None])


def cross_channel_energy(f: Float[Tensor, "b c h w"], weight: Float[Tensor, "n c"], scale: int) -> Float[Tensor, "b d"]:
    """Energy of N learned channel mixtures, (B, N * s * s).

    ``g[b, k, i, j] = mean over cell (i, j) of (sum_c weight[k, c] f[b, c, h, w])^2``
    """
    return spatial_energy(project_channels(f, weight), scale)


def mean_grids(x: Float[Tensor, "b c h w"], scales: tuple[int, ...]) -> list[Float[Tensor, "b d"]]:
    """``mean_cells`` of every scale, flattened; a coarse grid comes from the finest where that has equal cells."""
    finest = max(scales)
    fine = mean_cells(x, finest)
    even = x.shape[2] % finest == 0 and x.shape[3] % finest == 0

    def grid(scale: int) -> Tensor:
        return fine if scale == finest else mean_cells(fine if even and finest % scale == 0 else x, scale)

    return [grid(scale).flatten(1) for scale in scales]


def bicovg(
    f: Float[Tensor, "b c h w"], weight: Float[Tensor, "n c"] | None, scales: tuple[int, ...]
) -> Float[Tensor, "b d"]:
    """``[pcs(s1) | cc(s1) | pcs(s2) | cc(s2)]``; without ``weight``, the pcs parts alone.

    Squares and projections are computed once and shared by all scales. This is the definition, and the oracle of the
    fused kernel in ``bicovg.kernels.goodness`` and of ``bicovg.kernels.goodness_cpu``.
    """
    energies = [widen(f).square()]
    if weight is not None:
        energies.append(widen(project_channels(f, weight)).square())
    grids = [mean_grids(energy, scales) for energy in energies]
    return torch.cat([grid[i] for i in range(len(scales)) for grid in grids], dim=1)


class BiCovG(nn.Module):
    """Bi-axis covariance goodness of a block with ``channels`` channels.

    The ablation's four points are switches: ``scales=(1,), cross_channel=False`` is per-channel goodness,
    ``cross_channel=True`` adds CC, a second scale adds MS.

    Attributes:
        dim: the goodness dimension D = sum over scales of (C + N) s^2.
    """

    def __init__(
        self, channels: int, scales: tuple[int, ...] = (1, 2), reduction: int = 8, cross_channel: bool = True
    ) -> None:
        super().__init__()
        if not scales or min(scales) < 1:
            raise ValueError(f"scales {scales} must be one or more positive integers, for example (1, 2)")
        if cross_channel and (reduction < 1 or channels % reduction):
            raise ValueError(
                f"{channels} channels cannot be divided by reduction {reduction}: choose a reduction that divides them"
            )
        self.scales = tuple(scales)
        self.plain = False  # True: the plain function on every device
        self.shadow: Tensor | None = None  # the weight in bfloat16, kept up to date by ``bicovg.updates``
        projections = channels // reduction if cross_channel else 0
        self.dim = sum((channels + projections) * s * s for s in scales)
        self.weight: nn.Parameter | None = None
        if cross_channel:
            bound = 1 / math.sqrt(channels)
            self.weight = nn.Parameter(torch.empty(projections, channels).uniform_(-bound, bound))

    def forward(self, f: Float[Tensor, "b c h w"]) -> Float[Tensor, "b d"]:
        if f.is_cuda and not self.plain:
            from bicovg.kernels.goodness import fused_available, fused_bicovg

            if fused_available(f):
                return fused_bicovg(f, self.weight, self.scales)
        elif not self.plain:
            from bicovg.kernels.goodness_cpu import fits_cpu, lean_bicovg

            if fits_cpu(f, self.weight, self.scales):
                return lean_bicovg(f, self.weight, self.scales)
        return bicovg(f, self.weight, self.scales)

    def extra_repr(self) -> str:
        return f"dim={self.dim}, scales={self.scales}, cross_channel={self.weight is not None}"


class Readout(nn.Linear):
    """``W g + b`` with W and b drawn from U(-1/sqrt(D), 1/sqrt(D)), D the goodness dimension.

    Computed in at least float32 under autocast too: a product this small gains nothing from bfloat16 and would pay for
    eight casts a step.
    """

    def reset_parameters(self) -> None:
        bound = 1 / math.sqrt(self.in_features)
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, g: Float[Tensor, "b d"]) -> Float[Tensor, "b k"]:
        if g.is_meta:  # autocast does not know the device of a dry run
            return F.linear(g, self.weight, self.bias)
        with torch.autocast(g.device.type, enabled=False):
            return F.linear(widen(g), self.weight, self.bias)
