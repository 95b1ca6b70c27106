"""What ``make kernels`` checks on a GPU: nothing that a recipe trains may be missing."""

import ast
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bicovg.blocks import Block
from bicovg.config import Config
from bicovg.goodness import BiCovG
from bicovg.networks import LocalNetwork
from bicovg.preparation import build_on
from bicovg.recipes import RECIPES, get_recipe

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture(scope="module")
def checked() -> list[tuple[object, ...]]:
    code = "import kernel_blocks as k; print([tuple(block) for block in k.recipe_blocks()])"
    found = subprocess.run([sys.executable, "-c", code], cwd=BENCHMARKS, capture_output=True, text=True, check=True)
    return ast.literal_eval(found.stdout)  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def networks() -> dict[str, tuple[Config, LocalNetwork]]:
    configs = {name: get_recipe(name) for name in RECIPES}
    return {name: (config, build_on(config, torch.device("meta"))) for name, config in configs.items()}


def test_every_exit_of_every_recipe_is_checked(
    checked: list[tuple[object, ...]], networks: dict[str, tuple[Config, LocalNetwork]]
) -> None:
    goodness = {(C, H, scales, N) for _, _, C, H, scales, _, N in checked}
    tails = {(C, H, pool) for _, _, C, H, _, pool, _ in checked}
    for name, (config, net) in networks.items():
        side = config.data.image_size // config.model.stem
        for block in net.modules():
            if not isinstance(block, Block):
                continue
            C = block.conv.out_channels
            if isinstance(block.goodness, BiCovG):
                N = 0 if block.goodness.weight is None else len(block.goodness.weight)
                assert (C, side, block.goodness.scales, N) in goodness, (name, block.index)
            assert (C, side, block.pool) in tails, (name, block.index)
            side = side // 2 if block.pool else side


def test_none_is_checked_twice(checked: list[tuple[object, ...]]) -> None:
    assert len({row[2:] for row in checked}) == len(checked)


def test_every_entrance_of_every_recipe_is_checked(
    networks: dict[str, tuple[Config, LocalNetwork]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from kernel_edges import BORDERS, IMAGE, recipe_edges
    from kernels import make_tasks

    edges = recipe_edges()
    images = {edge[3:] for edge in edges if edge.kind == IMAGE}
    behind_fal = {edge[4:] for edge in edges if edge.kind == BORDERS}
    assert len(images) + len(behind_fal) == len(edges)
    for name, (config, net) in networks.items():
        side = config.data.image_size // config.model.stem
        for unit in net.units:
            for place, block in enumerate(getattr(unit, "blocks", [])):
                before, after = block.conv.in_channels, block.conv.out_channels
                assert block.index or (before, after, side) in images, name
                assert block.alignment is None or place or (after, side) in behind_fal, (name, block.index)
                side = side // 2 if block.pool else side
    tasks = [task for task in make_tasks() if task[0] in edges]
    assert len(tasks) == len(images) + 2 * len(behind_fal)


@pytest.mark.parametrize("value", [0.0, math.nan])
def test_one_tile_lost_in_one_sample_is_noticed(value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is too little of the batch for the batch's own limit in bfloat16."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from kernel_checks import distances
    from kernels import is_within

    wanted = torch.randn(64, 64, 32, 32, dtype=torch.float64)
    found = wanted.clone()
    found[5, :16, 3, :16] = value
    errors = distances("dy", found, wanted)
    fine = {name: is_within(name, error, torch.bfloat16) for name, error in errors.items()}
    assert fine == {"dy": value == 0.0, "dy of a sample": False}


def test_limits_of_the_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from kernels import is_within

    assert is_within("dgamma", 5e-3, torch.bfloat16)
    assert not is_within("g of a sample", 5e-3, torch.bfloat16)
    assert not is_within("dy", 2e-5, torch.float32)
    for dtype in (torch.bfloat16, torch.float32):
        assert is_within("in place", 0.0, dtype)
        assert not is_within("in place", 1.0, dtype)
