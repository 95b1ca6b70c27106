"""RMSNorm, RMSPool, keyed dropout and the Feature Alignment Layer, each as a function and a thin module.

Paper: sections 3.3 and 3.4. The paper leaves the gradient at zero open: here RMSPool of an all-zero window and
RMSNorm of an all-zero sample have gradient 0, never NaN.
"""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from bicovg.draws import keep_mask
from bicovg.goodness import transformed, widen


def safe_sqrt(x: Tensor) -> Tensor:
    """sqrt whose value and gradient at 0 are 0 (its true slope there is infinite); NaN stays NaN."""
    if not (torch.is_grad_enabled() or transformed()):
        return x.sqrt()
    zero = x == 0
    return torch.where(zero, 0.0, torch.where(zero, 1.0, x).sqrt())


def rms_norm(x: Float[Tensor, "b ..."], eps: float = 1e-6) -> Float[Tensor, "b ..."]:
    """``x / (sqrt(mean(x^2 over all but the batch)) + eps)``, no parameters; squares in at least float32."""
    wide = widen(x)
    rms = safe_sqrt(wide.square().mean(dim=tuple(range(1, x.dim())), keepdim=True))
    return (wide / torch.where(rms == 0, math.inf, rms + eps)).to(x.dtype)


def rms_pool(x: Float[Tensor, "b c h w"], size: int = 2) -> Float[Tensor, "b c p q"]:
    """Root of the mean square in each size x size window; an odd map drops its last row / column."""
    return safe_sqrt(F.avg_pool2d(widen(x).square(), size)).to(x.dtype)


def check_dropout(drop: float) -> float:
    """The probability itself; one of 1 would leave nothing to scale up."""
    if not 0 <= drop < 1:
        raise ValueError(f"dropout {drop:g} must be at least 0 and below 1")
    return drop


def keyed_dropout(x: Float[Tensor, "b ..."], drop: float, keys: Int[Tensor, " b"]) -> Float[Tensor, "b ..."]:
    """Dropout whose mask is a function of each sample's key (see ``bicovg.draws``), scaled by 1 / (1 - drop)."""
    if drop == 0.0:
        return x
    # a mask in another order than the map's would turn the product's
    channels_last = x.device.type == "cpu" and x.dim() == 4 and x.shape[1] > 1 and x.stride(1) == 1
    keep = keep_mask(keys, x.shape[1:], drop, channels_last)
    return torch.where(keep, x * (1.0 / (1.0 - drop)), 0.0).to(x.dtype)


def feature_alignment(
    h: Float[Tensor, "b c h w"], w1: Float[Tensor, "d c"], w2: Float[Tensor, "c d"]
) -> Float[Tensor, "b c h w"]:
    """``h + W2 relu(W1 GAP(h))``, the correction broadcast over the map."""
    return add_offset(h, alignment_offset(h, w1, w2))


def alignment_offset(
    h: Float[Tensor, "b c h w"], w1: Float[Tensor, "d c"], w2: Float[Tensor, "c d"]
) -> Float[Tensor, "b c"]:
    """``W2 relu(W1 GAP(h))``."""
    mean = h.mean(dim=(2, 3), dtype=torch.promote_types(h.dtype, torch.float32)).to(w1.dtype)
    return F.linear(F.relu(F.linear(mean, w1)), w2)


def add_offset(h: Float[Tensor, "b c h w"], offset: Float[Tensor, "b c"]) -> Float[Tensor, "b c h w"]:
    """h plus a number for each sample and channel."""
    return h + offset[:, :, None, None].to(h.dtype)


class RMSNorm(nn.Module):
    """Module form of ``rms_norm``."""

    def __init__(self, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Float[Tensor, "b ..."]) -> Float[Tensor, "b ..."]:
        return rms_norm(x, self.eps)


class RMSPool(nn.Module):
    """Module form of ``rms_pool``."""

    def __init__(self, size: int = 2) -> None:
        super().__init__()
        self.size = size

    def forward(self, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c p q"]:
        return rms_pool(x, self.size)


class FeatureAlignment(nn.Module):
    """FAL: a channel-wise correction at a unit's entrance, owned and trained by the unit that consumes it.

    W2 starts at zero, so the layer starts as the exact identity.
    """

    def __init__(self, channels: int, hidden: int = 512) -> None:
        super().__init__()
        self.w1 = nn.Linear(channels, hidden, bias=False)
        self.w2 = nn.Linear(hidden, channels, bias=False)
        nn.init.zeros_(self.w2.weight)

    def offset(self, h: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c"]:
        """The correction alone."""
        return alignment_offset(h, self.w1.weight, self.w2.weight)

    def forward(self, h: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c h w"]:
        return feature_alignment(h, self.w1.weight, self.w2.weight)
