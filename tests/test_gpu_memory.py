"""Settings of torch's memory: given where there are none, and what somebody has set stays."""

import os
import sys

import pytest

from bicovg.gpu_memory import ALLOCATORS, DETERMINISTIC, SMALL, WORKSPACE, spare_memory


@pytest.fixture(autouse=True)
def _nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (WORKSPACE, *ALLOCATORS):
        monkeypatch.delenv(name, raising=False)


def test_both_are_set_where_nobody_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    spare_memory()
    assert os.environ[WORKSPACE] == SMALL
    assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"


@pytest.mark.parametrize("name", ALLOCATORS)
def test_what_is_set_stays(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WORKSPACE, ":16:8")
    monkeypatch.setenv(name, "max_split_size_mb:64")
    for deterministic in (False, True):
        spare_memory(deterministic)
    assert os.environ[WORKSPACE] == ":16:8"
    assert {key: os.environ[key] for key in ALLOCATORS if key in os.environ} == {name: "max_split_size_mb:64"}


def test_a_deterministic_run_gets_what_torch_asks_for_even_after_another() -> None:
    spare_memory()
    spare_memory(deterministic=True)
    assert os.environ[WORKSPACE] == DETERMINISTIC
    spare_memory()
    assert os.environ[WORKSPACE] == DETERMINISTIC


def test_segments_grow_on_linux_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    spare_memory()
    assert not any(name in os.environ for name in ALLOCATORS)
