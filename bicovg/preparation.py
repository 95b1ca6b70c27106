"""From a config to a checked network on a device, before anything is opened or written."""

import torch

from bicovg.blocks import Block
from bicovg.choosing import ENGINES
from bicovg.config import Config, DataConfig
from bicovg.data.crops import MAX_PLACES
from bicovg.data.splits import Splits
from bicovg.distributed import Team
from bicovg.errors import UserError
from bicovg.gpu_memory import spare_memory
from bicovg.limits import check_settings
from bicovg.methods import build_network
from bicovg.networks import LocalNetwork, dry_run
from bicovg.step import check_step


def pick_device(name: str) -> torch.device:
    """``auto`` takes a GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("the device cuda was asked for and no CUDA device is visible: use cpu or auto")
    if name not in ("cpu", "cuda"):
        raise UserError(f"the device {name!r} is unknown: choose auto, cpu or cuda")
    return torch.device(name)


def check_config(config: Config) -> None:
    """Everything that can be known to be wrong before data is opened or a folder is made."""
    check_settings(config)
    train, data = config.train, config.data
    check_crops(data)
    try:
        check_step(train.schedule, train.clip_norm, train.clip_scope, train.precision)
    except ValueError as error:
        raise UserError(str(error)) from None
    try:
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
    if train.micro_batches > 1:
        check_parts(config)
    if train.engine not in ENGINES:
        raise UserError(f"--train.engine {train.engine!r} is unknown: choose one of {', '.join(ENGINES)}")


def check_parts(config: Config) -> None:
    """What micro-batches do not go with: two stages would meet parts of batches, and several processes' first parts
    together are no part of the whole batch, whose statistics synced batch norm promises.
    """
    train = config.train
    for other, meant in (("stages", train.stages > 1), ("batch_norm_stats", train.batch_norm_stats == "synced")):
        if meant:
            both = f"{train.micro_batches} does not go with --train.{other} {getattr(train, other)}"
            raise UserError(f"--train.micro_batches {both}: use one of them")


def check_crops(data: DataConfig) -> None:
    """At most one crop, with no more padding than image."""
    pad, crop = data.augment.crop_pad, data.augment.resized_crop
    if pad and crop:
        raise UserError(
            f"--data.augment.crop_pad {pad} and --data.augment.resized_crop {crop} are two crops of one image: "
            "set one of them to 0"
        )
    if pad > data.image_size:
        raise UserError(
            f"--data.augment.crop_pad {pad} is more than --data.image_size {data.image_size}: "
            f"use at most {data.image_size}"
        )


def check_fit(config: Config, splits: Splits, net: LocalNetwork, team: Team) -> None:
    """What can be known to be wrong once the data set is open: training would fail at its first batch."""
    data, count = config.data, config.train.batch_size
    if count > len(splits.train):
        raise UserError(f"--train.batch_size {count} is larger than the {len(splits.train)} training images")
    if splits.train.sizes is not None and not (data.augment.resized_crop and data.resize):
        raise UserError(
            f"the images of {data.name} have several sizes: give --data.augment.resized_crop {data.image_size} and "
            f"--data.resize {data.image_size} or more, or pack them again with --size {data.image_size}"
        )
    if min(splits.std) <= 0:
        other = "use --data.normalise imagenet, or " if len(splits.std) == 3 else ""
        raise UserError(
            f"channel {splits.std.index(min(splits.std))} of the training images of {data.name} has one value "
            f"everywhere, so it cannot be normalised: {other}pack images that differ"
        )
    places = count // team.data * (data.image_size + 2 * data.augment.crop_pad) ** 2
    if (data.augment.crop_pad or data.augment.flip) and not data.augment.resized_crop and places >= MAX_PLACES:
        raise UserError(
            f"--train.batch_size {count} has {places} pixels with their padding, above {MAX_PLACES - 1}: lower it, or "
            "--data.augment.crop_pad"
        )
    parts, share = config.train.micro_batches, count // team.data
    if share % parts:
        whose = "" if team.data == 1 else f", {share} of them in each of {team.data} processes,"
        raise UserError(
            f"--train.batch_size {count}{whose} cannot be cut into --train.micro_batches {parts} equal parts: "
            f"choose a divisor of {share}"
        )
    check_norms(net, data.image_size, count if config.train.batch_norm_stats == "synced" else share // parts)


def check_norms(net: LocalNetwork, side: int, images: int) -> None:
    """Batch norm has no statistics of a single value."""
    side //= net.stem
    for block in (module for module in net.modules() if isinstance(module, Block)):
        if block.norm is not None and images * side * side == 1:
            raise UserError(
                f"block {block.index}: batch norm needs more than one value a channel and has a 1x1 map of one image: "
                "use a larger --train.batch_size, fewer --train.micro_batches or --model.pools, or "
                "--model.batch_norm false"
            )
        side = side // 2 if block.pool else side


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
    spare_memory(config.train.deterministic)
    if config.train.deterministic:
        torch.use_deterministic_algorithms(True)
