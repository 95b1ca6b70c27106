"""bicovg: covariance-aware Forward-Forward learning.

The public names, in one place. They are imported on first use, so that ``import bicovg`` costs nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "spatial_energy": "goodness",
    "cross_channel_energy": "goodness",
    "BiCovG": "goodness",
    "Readout": "goodness",
    "rms_norm": "layers",
    "rms_pool": "layers",
    "RMSNorm": "layers",
    "RMSPool": "layers",
    "FeatureAlignment": "layers",
    "Block": "blocks",
    "Unit": "blocks",
    "LocalNetwork": "networks",
    "local_network": "networks",
    "vgg8": "networks",
    "vgg16": "networks",
    "vgg16_classic": "networks",
    "local_step": "step",
    "LogisticFusion": "fusion",
    "decline_area": "diagnostics",
    "tail_retention": "diagnostics",
    "mean_gain": "diagnostics",
    "effective_layers": "diagnostics",
    "load": "export",
    "localize": "localization",
}

if TYPE_CHECKING:
    from bicovg.blocks import Block, Unit
    from bicovg.diagnostics import decline_area, effective_layers, mean_gain, tail_retention
    from bicovg.export import load
    from bicovg.fusion import LogisticFusion
    from bicovg.goodness import BiCovG, Readout, cross_channel_energy, spatial_energy
    from bicovg.layers import FeatureAlignment, RMSNorm, RMSPool, rms_norm, rms_pool
    from bicovg.localization import localize
    from bicovg.networks import LocalNetwork, local_network, vgg8, vgg16, vgg16_classic
    from bicovg.step import local_step

__all__ = [
    "BiCovG",
    "Block",
    "FeatureAlignment",
    "LocalNetwork",
    "LogisticFusion",
    "RMSNorm",
    "RMSPool",
    "Readout",
    "Unit",
    "cross_channel_energy",
    "decline_area",
    "effective_layers",
    "load",
    "local_network",
    "local_step",
    "localize",
    "mean_gain",
    "rms_norm",
    "rms_pool",
    "spatial_energy",
    "tail_retention",
    "vgg8",
    "vgg16",
    "vgg16_classic",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'bicovg' has no attribute {name!r}")
    return getattr(importlib.import_module(f"bicovg.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
