"""Everything a run is, as frozen dataclasses. No torch: ``bicovg --help`` reads this.

A config never enters a model class: ``bicovg.methods`` turns it into flat arguments. On disk it is complete JSON.
"""

import dataclasses
import difflib
import json
import reprlib
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

from bicovg.backbones import SCOPES
from bicovg.errors import UserError

NORM_STATS = ("local", "synced")


def _field(default: Any, help: str, *, later: bool = False, **limits: Any) -> Any:
    """A setting with its help and its ``choices``, ``low``, ``above``, ``high`` or ``below`` (see bicovg.limits).

    One that came ``later`` is absent from older runs, which did what its default does.
    """
    return field(default=default, metadata={"help": help, "limits": limits, "later": later})


@dataclass(frozen=True)
class AugmentConfig:
    """Training transforms, drawn per sample from (seed, epoch, index)."""

    crop_pad: int = _field(0, "zero padding of the random crop back to the image size; 0 turns it off", low=0)
    flip: bool = _field(False, "horizontal flip with probability 1/2")
    resized_crop: int = _field(0, "output side of the random resized crop; 0 turns it off", low=0, high=16384)
    brightness: float = _field(0.0, "jitter strength", low=0)
    contrast: float = _field(0.0, "jitter strength", low=0)
    saturation: float = _field(0.0, "jitter strength", low=0)
    hue: float = _field(0.0, "jitter strength, at most 0.5", low=0, high=0.5)
    grayscale: float = _field(0.0, "probability of dropping colour", low=0, high=1)


@dataclass(frozen=True)
class DataConfig:
    """Which images, how they are split and prepared."""

    name: str = _field("digits", "digits (built in), synthetic, or the name of a packed data set")
    root: str | None = _field(None, "folder of packed data sets; default: $BICOVG_DATA or ./data")
    image_size: int = _field(8, "side of the network's input image", low=1, high=16384)
    image_channels: int = _field(
        1, "1 for gray, as the digits; 3 for colour, and for all packed images", choices=(1, 3)
    )
    num_classes: int = _field(10, "number of classes K; must agree with the labels", low=2)
    holdout: float = _field(
        0.0, "share of the training images held out (seeded, stratified); 0: curves are on test", low=0, below=1
    )
    split_seed: int = _field(0, "seed of the held-out split, the same for every training seed", low=0, below=2**63)
    normalise: str = _field(
        "train", "mean and std of: train (this training set) or imagenet", choices=("train", "imagenet")
    )
    resize: int = _field(0, "short side of test images before the centre crop; 0: no resize", low=0, high=16384)
    prefetch: int = _field(2, "batches prepared ahead when the data set does not fit the device", low=0)
    augment: AugmentConfig = field(default_factory=AugmentConfig)


@dataclass(frozen=True)
class ModelConfig:
    """The network: a method (one file under bicovg/methods) and its flat arguments."""

    method: str = _field("bicovg", "which file of bicovg/methods builds the network")
    channels: tuple[int, ...] = _field((32, 64, 64, 128), "channels of each block", low=1)
    pools: tuple[int, ...] = _field((1,), "blocks followed by RMSPool", low=0)
    scales: tuple[tuple[int, ...], ...] = _field(((2, 4), (2, 4), (1, 2), (1, 2)), "grid scales of each block", low=1)
    groups: tuple[int, ...] = _field((2, 2), "blocks in each group; a FAL stands between groups", low=1)
    scope: str = _field("strict", "strict, grouped, hgb or end-to-end", choices=SCOPES)
    group_size: int = _field(1, "blocks per unit for scope hgb", low=1)
    alignment: bool = _field(False, "FAL at the standard places")
    exits: str = _field("last", "end-to-end exits: last, or all (deep supervision)", choices=("last", "all"))
    width: float = _field(1.0, "multiplies every channel count", above=0)
    batch_norm: bool = _field(True, "batch norm after each convolution")
    dropout: float = _field(0.1, "dropout at each block's end (classic VGG-16: in its head)", low=0, below=1)
    reduction: int = _field(8, "r: channels per cross-channel projection", low=1)
    cross_channel: bool = _field(True, "cross-channel energies (CC)")
    multi_scale: bool = _field(True, "two grid scales (MS); off: scale 1 alone")
    stem: int = _field(1, "side of the average pool on the input image; 1: none", low=1)
    checkpointing: bool = _field(False, "recompute inner activations in the backward pass")


@dataclass(frozen=True)
class OptimConfig:
    """One optimizer per unit, one learning rate for all: cosine per step after a linear warm-up from 0."""

    name: str = _field("adamw", "adamw or sgd", choices=("adamw", "sgd"))
    lr: float = _field(2e-3, "peak learning rate", low=0)
    lr_min: float = _field(1e-5, "learning rate at the end of the cosine", low=0)
    momentum: float = _field(0.9, "sgd only", low=0, below=1)
    weight_decay: float = _field(1e-3, "on all parameters", low=0)
    warmup_epochs: float = _field(0.0, "epochs of linear warm-up from 0", low=0)


@dataclass(frozen=True)
class TrainConfig:
    """How long, how large, how precise."""

    epochs: int = _field(30, "passes over the training images", low=1)
    batch_size: int = _field(64, "images per step, over all processes", low=1)
    micro_batches: int = _field(
        1, "parts of a batch, one after the other, for memory; batch norm sees each by itself", low=1, later=True
    )
    schedule: str = _field(
        "interleaved", "interleaved (one unit alive at a time) or summed", choices=("interleaved", "summed")
    )
    clip_norm: float | None = _field(None, "gradient norm bound, or none", above=0)
    clip_scope: str = _field("unit", "the clip covers each unit, or global (summed only)", choices=("unit", "global"))
    overlap: bool = _field(True, "GPU: all units side by side on several streams, not just small ones; takes memory")
    precision: str = _field("float32", "float32 or bfloat16 (autocast)")
    engine: str = _field("auto", "auto, graph, compiled, eager or plain")
    device: str = _field("auto", "auto, cpu or cuda", choices=("auto", "cpu", "cuda"))
    threads: int = _field(0, "CPU threads; 0 leaves torch's choice", low=0, high=1024)
    eval_every: int = _field(1, "epochs between evaluations of every exit; the last epoch is always evaluated", low=1)
    save_every: int = _field(1, "epochs between checkpoints; 0: none at epoch ends", low=0)
    save_seconds: float = _field(600.0, "seconds between checkpoints inside and across epochs; 0: none by time", low=0)
    keep: int = _field(2, "checkpoints kept, at least 2", low=2)
    nonfinite: str = _field(
        "stop", "on a NaN or Inf in a unit's loss or gradient: stop, or skip that step", choices=("stop", "skip")
    )
    processes: int = _field(0, "shares of the batch, one per process, that the run must have; 0: any number", low=0)
    batch_norm_stats: str = _field(
        "local", "several processes: batch norm over each one's share (local) or over all (synced)", choices=NORM_STATS
    )
    stages: int = _field(1, "stages of consecutive units, each on a process of its own (block parallel)", low=1)
    cuts: tuple[int, ...] = _field((), "first unit of every stage but the first; empty: balanced by measuring", low=1)
    queue_depth: int = _field(2, "batches that may wait between two stages", low=1)
    timeout: float = _field(300.0, "seconds after which a silent process counts as lost", above=0)
    deterministic: bool = _field(False, "only deterministic GPU kernels (slower); the CPU always is")


@dataclass(frozen=True)
class FusionConfig:
    """Logistic fusion of the exits."""

    steps: int = _field(500, "full-batch Adam steps", low=0)
    lr: float = _field(0.01, "Adam learning rate", low=0)


@dataclass(frozen=True)
class Config:
    """A complete run."""

    recipe: str = _field("digits", "name of the recipe this came from")
    about: str = _field("", "one line: which row of which table")
    seed: int = _field(0, "seed of initialisation, order, augmentation and dropout", low=0, below=2**63)
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    fusion: FusionConfig = field(default_factory=FusionConfig)


FIXED = ("recipe", "about")  # a label, not a setting


@dataclass(frozen=True)
class Setting:
    """One leaf of the config tree: ``optim.lr`` with its type, default and help.

    ``as_before``: it came later and has the value that stands for what older runs, without it, did.
    """

    path: str
    kind: Any
    default: Any
    help: str
    limits: Mapping[str, Any]
    as_before: bool


def walk_settings(config: Any, prefix: str = "") -> Iterator[Setting]:
    """Every leaf of a config, depth first."""
    hints = typing.get_type_hints(type(config))
    for item in fields(config):
        value, path = getattr(config, item.name), prefix + item.name
        if is_dataclass(value):
            yield from walk_settings(value, path + ".")
        elif path not in FIXED:
            as_before = item.metadata["later"] and value == item.default
            yield Setting(path, hints[item.name], value, item.metadata["help"], item.metadata["limits"], as_before)


def parse_value(text: str, kind: Any, path: str) -> Any:
    """A command-line word as the field's type: numbers, true/false, none, ``32,64``, ``[[2,4],[1,2]]``."""
    if isinstance(kind, types.UnionType):
        if text.lower() in ("none", "null"):
            return None
        kind = next(option for option in typing.get_args(kind) if option is not type(None))
    if kind is str:
        return text
    try:
        if kind is bool:
            return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}[text.lower()]
        if typing.get_origin(kind) is tuple:
            return coerce(json.loads(text if text.startswith("[") else f"[{text}]"), kind, path)
        return kind(text)
    except (ValueError, KeyError, RecursionError):
        raise UserError(f"--{path} {reprlib.repr(text)} is not {describe(kind)}") from None


def describe(kind: Any) -> str:
    """A type in a user's words."""
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a word"}
    return names.get(kind, "a list such as 32,64 or [[2,4],[1,2]]")


def coerce(value: Any, kind: Any, path: str) -> Any:
    """A JSON value as the field's type, or a UserError naming the field."""
    if isinstance(kind, types.UnionType):
        if value is None:
            return None
        kind = next(option for option in typing.get_args(kind) if option is not type(None))
    if typing.get_origin(kind) is tuple and isinstance(value, list | tuple):
        inner = typing.get_args(kind)[0]
        return tuple(coerce(item, inner, path) for item in value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 1000:
        return float(value)
    if kind in (int, float, bool, str) and type(value) is kind:
        return value
    raise UserError(f"config field {path} has the value {reprlib.repr(value)}, which is not {describe(kind)}")


def nearest(word: str, known: list[str]) -> str:
    """``; did you mean ...?`` or nothing."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else ""


def override(config: Config, changes: Mapping[str, Any]) -> Config:
    """A copy with dotted paths replaced: ``override(c, {"optim.lr": 0.1})``."""
    known = {setting.path: setting for setting in walk_settings(config)}
    result: Any = config
    for path, value in changes.items():
        if path not in known and path not in FIXED:
            raise UserError(f"unknown field {path!r}{nearest(path, list(known))}")
        result = _replace_path(result, path.split("."), value)
    return typing.cast(Config, result)


def _replace_path(node: Any, names: list[str], value: Any) -> Any:
    if len(names) == 1:
        return replace(node, **{names[0]: value})
    return replace(node, **{names[0]: _replace_path(getattr(node, names[0]), names[1:], value)})


def to_json(config: Config) -> str:
    return json.dumps(dataclasses.asdict(config), indent=2) + "\n"


def from_json(text: str, origin: str = "config") -> Config:
    """Read a complete config; unknown, missing or mistyped fields are UserErrors, but for those that came later."""
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError):
        raise UserError(f"{origin} is not valid JSON: restore it or start a new run") from None
    return typing.cast(Config, _build(Config, tree, "", origin))


def _build(kind: Any, tree: Any, prefix: str, origin: str) -> Any:
    if not isinstance(tree, dict):
        raise UserError(f"{origin}: {prefix.rstrip('.') or 'the top level'} must be an object, not {tree!r:.40}")
    hints = typing.get_type_hints(kind)
    names = [item.name for item in fields(kind)]
    later = {item.name: item.metadata.get("later", False) for item in fields(kind)}
    for name in tree:
        if name not in names:
            raise UserError(f"{origin}: unknown field {prefix}{name!s:.40}{nearest(str(name), names)}")
    values = {}
    for name in names:
        if name not in tree and later[name]:
            continue
        if name not in tree:
            raise UserError(f"{origin}: field {prefix}{name} is missing")
        hint = hints[name]
        build = _build if is_dataclass(hint) else None
        path = prefix + name
        values[name] = build(hint, tree[name], path + ".", origin) if build else coerce(tree[name], hint, path)
    return kind(**values)
