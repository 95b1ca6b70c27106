"""The paper's two backbone tables, and how a scope cuts a depth into units. No torch: recipes import this."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

SCOPES = ("strict", "grouped", "hgb", "end-to-end")


@dataclass(frozen=True)
class Backbone:
    """Depth, width, pools, grid scales and stage groups of a network, one entry per block where plural."""

    channels: tuple[int, ...]
    pools: tuple[int, ...]
    scales: tuple[tuple[int, ...], ...]
    groups: tuple[int, ...]

    def as_arguments(self) -> dict[str, object]:
        return asdict(self)


VGG8 = Backbone(
    channels=(128, 256, 256, 512, 512, 512, 512, 512),
    pools=(1, 3, 4, 5),
    scales=((2, 4),) + ((1, 2),) * 7,
    groups=(4, 4),
)
VGG16 = Backbone(
    channels=(128, 128, 256, 256) + (512,) * 12,
    pools=(1, 3, 7, 11),
    scales=((2, 4),) * 2 + ((1, 2),) * 14,
    groups=(2, 2, 4, 4, 4),
)


def unit_sizes(depth: int, scope: str, group_size: int = 1, groups: Sequence[int] | None = None) -> list[int]:
    """How many blocks each unit holds."""
    if scope == "strict":
        return [1] * depth
    if scope == "end-to-end":
        return [depth]
    if scope == "hgb":
        if group_size < 1 or depth % group_size:
            raise ValueError(f"group_size {group_size} does not divide the {depth} blocks: choose a divisor of {depth}")
        return [group_size] * (depth // group_size)
    if scope == "grouped":
        return list(_checked_groups(depth, groups))
    raise ValueError(f"scope {scope!r} is unknown: choose one of {', '.join(SCOPES)}")


def group_starts(depth: int, scope: str, sizes: Sequence[int], groups: Sequence[int] | None) -> tuple[int, ...]:
    """First block of every group but the first: where a FAL stands. For hgb every unit is a group."""
    cut = sizes if scope == "hgb" else _checked_groups(depth, groups)
    return tuple(sum(cut[:i]) for i in range(1, len(cut)))


def _checked_groups(depth: int, groups: Sequence[int] | None) -> Sequence[int]:
    if not groups or sum(groups) != depth or min(groups) < 1:
        raise ValueError(f"groups {tuple(groups or ())} must be positive block counts that add up to {depth}")
    return groups
