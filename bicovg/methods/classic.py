"""Backprop on the standard 13-convolution VGG-16 with its 4096-4096 head: the paper's BP row."""

from bicovg.config import ModelConfig
from bicovg.networks import LocalNetwork, vgg16_classic


def build(model: ModelConfig, num_classes: int, in_channels: int) -> LocalNetwork:
    return vgg16_classic(num_classes, in_channels, model.width, model.dropout)
