"""From a config to a checked network on a device, before anything is opened or written."""

import os

import torch

from bicovg.config import Config
from bicovg.engine import ENGINES
from bicovg.errors import UserError
from bicovg.limits import check_settings
from bicovg.methods import build_network
from bicovg.networks import LocalNetwork, dry_run
from bicovg.step import check_step


def pick_device(name: str) -> torch.device:
    """``auto`` takes a GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("--train.device cuda: no CUDA device is visible; use cpu or auto")
    if name not in ("cpu", "cuda"):
        raise UserError(f"--train.device {name!r} is unknown: choose auto, cpu or cuda")
    return torch.device(name)


def check_config(config: Config) -> None:
    """Everything that can be known to be wrong before data is opened or a folder is made."""
    check_settings(config)
    train, data = config.train, config.data
    try:
        check_step(train.schedule, train.clip_norm, train.clip_scope, train.precision)
        dry_run(
            lambda: build_network(config.model, data.num_classes, data.image_channels),
            (data.image_channels, data.image_size, data.image_size),
        )
    except UserError:
        raise
    except (ValueError, RuntimeError, TypeError, OverflowError) as error:
        # torch refuses sizes beyond its integers with a RuntimeError or TypeError of its own
        raise UserError(f"this network cannot be built: {str(error).splitlines()[0]}") from None
    if train.batch_norm_stats == "synced" and config.model.checkpointing:
        raise UserError("--train.batch_norm_stats synced does not go with --model.checkpointing true: use one of them")
    if train.engine not in ENGINES:
        raise UserError(f"--train.engine {train.engine!r} is unknown: choose one of {', '.join(ENGINES)}")


def build_on(config: Config, device: torch.device) -> LocalNetwork:
    """The network of a config, initialised from its seed on the CPU (so that devices agree), then moved."""
    torch.manual_seed(config.seed)
    net = build_network(config.model, config.data.num_classes, config.data.image_channels)
    if device.type == "cuda":
        return net.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]
    return net.to(device)


def set_up_process(config: Config) -> None:
    """Threads and determinism: settings of the whole process."""
    if config.train.threads:
        torch.set_num_threads(config.train.threads)
    if config.train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
