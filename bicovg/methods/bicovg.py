"""BiCovG and its scopes, from strict to end-to-end: units of a VGG-like backbone, credit by loss."""

from bicovg.config import ModelConfig
from bicovg.networks import LocalNetwork, local_network


def build(model: ModelConfig, num_classes: int, in_channels: int) -> LocalNetwork:
    return local_network(
        num_classes,
        model.channels,
        model.pools,
        model.scales,
        in_channels=in_channels,
        scope=model.scope,
        group_size=model.group_size,
        groups=model.groups,
        alignment=model.alignment,
        exits=model.exits,
        width=model.width,
        batch_norm=model.batch_norm,
        dropout=model.dropout,
        reduction=model.reduction,
        cross_channel=model.cross_channel,
        multi_scale=model.multi_scale,
        stem=model.stem,
        checkpointing=model.checkpointing,
    )
