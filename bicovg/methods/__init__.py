"""Methods: one file each, with ``build(model, num_classes, in_channels) -> LocalNetwork``.

The engine knows none of them by name: ``model.method`` in a config is the file's name.
"""

import importlib
import pkgutil

from bicovg.config import ModelConfig, nearest
from bicovg.errors import UserError
from bicovg.networks import LocalNetwork


def build_network(model: ModelConfig, num_classes: int, in_channels: int) -> LocalNetwork:
    """The network a config describes, on the current default device."""
    known = [module.name for module in pkgutil.iter_modules(__path__)]
    if model.method not in known:
        raise UserError(f"unknown method {model.method!r}{nearest(model.method, known)} (known: {', '.join(known)})")
    module = importlib.import_module(f"{__name__}.{model.method}")
    net: LocalNetwork = module.build(model, num_classes, in_channels)
    return net
