"""Batches are functions of (seed, epoch, index): not of prefetch, resume, residency or the number of processes."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from loader_cases import (
    BATCH,
    COUNT,
    IMAGES,
    LABELS,
    RECIPE,
    Pictures,
    digest,
    digests,
    make_loader,
    make_source,
)

from bicovg.data.images import ImageSource, MappedImages, TensorImages, VariableImages
from bicovg.data.loader import Batch
from bicovg.errors import UserError

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


@pytest.fixture(params=["tensor", "mapped", "variable"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> ImageSource:
    return make_source(request.param, tmp_path)


def test_prefetch_depth_does_not_change_a_batch(source: ImageSource) -> None:
    expected = digests(make_loader(source, prefetch=0))
    assert len(set(expected)) == COUNT // BATCH
    for prefetch in (1, 4, 100):
        assert digests(make_loader(source, prefetch=prefetch)) == expected


def test_a_resident_data_set_gives_the_same_batches(tmp_path: Path) -> None:
    for kind in ("tensor", "mapped"):
        source = make_source(kind, tmp_path)
        resident = make_loader(source, resident=True)
        assert resident.resident_images is not None
        assert digests(resident) == digests(make_loader(source))
        shared = make_loader(source, resident=resident.resident_images)
        assert shared.resident_images is resident.resident_images


def test_on_the_cpu_a_tensor_is_used_without_a_copy_and_a_memory_map_is_not_read_in(tmp_path: Path) -> None:
    images = torch.from_numpy(IMAGES)
    assert make_loader(TensorImages(images, LABELS), resident="auto").resident_images is images
    assert make_loader(make_source("mapped", tmp_path), resident="auto").resident_images is None


@pytest.mark.parametrize("prefetch", [0, 2])
def test_resuming_at_any_step_continues_the_epoch(source: ImageSource, prefetch: int) -> None:
    whole = digests(make_loader(source, prefetch=prefetch), epoch=2)
    for start in range(len(whole) + 1):
        assert digests(make_loader(source, prefetch=prefetch), epoch=2, start_step=start) == whole[start:]


@pytest.mark.parametrize("world", [2, 4])
def test_the_shares_of_all_processes_are_the_batch_of_one(source: ImageSource, world: int) -> None:
    ranks = [make_loader(source, rank=rank, world=world).batches(1) for rank in range(world)]
    for one, *shares in zip(make_loader(source).batches(1), *ranks, strict=True):
        joined = Batch(*(torch.cat(parts) for parts in zip(*shares, strict=True)))
        assert all(len(share.labels) == BATCH // world for share in shares)
        assert digest(joined) == digest(one)


RANK = """
import sys
from pathlib import Path
import numpy as np
from loader_cases import make_loader, make_source
kind, folder, rank = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
(folder / str(rank)).mkdir()
loader = make_loader(make_source(kind, folder / str(rank)), rank=rank, world=2, prefetch=4 * rank)
parts = {}
for step, batch in enumerate(loader.batches(1)):
    parts.update({f"{step} {name}": part.numpy() for name, part in batch._asdict().items()})
np.savez(folder / f"{rank}.npz", **parts)
"""


@pytest.mark.parametrize("kind", ["mapped", "variable"])
def test_two_processes_together_make_the_batches_of_one(kind: str, tmp_path: Path) -> None:
    tests = Path(__file__).parent
    path = os.pathsep.join([str(tests), str(tests.parent)])
    running = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, kind, str(tmp_path), str(rank)],
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": str(rank)},
        )
        for rank in range(2)
    ]
    assert [process.wait(timeout=120) for process in running] == [0, 0]
    shares = [np.load(tmp_path / f"{rank}.npz") for rank in range(2)]
    one = list(make_loader(make_source(kind, tmp_path)).batches(1))
    assert len(shares[0]) == len(shares[1]) == 3 * len(one) > 0
    for step, batch in enumerate(one):
        joined = [np.concatenate([share[f"{step} {name}"] for share in shares]) for name in Batch._fields]
        assert digest(Batch(*map(torch.from_numpy, joined))) == digest(batch)


def test_a_sample_looks_the_same_in_a_batch_of_another_size(source: ImageSource) -> None:
    seen: dict[int, torch.Tensor] = {}
    for batch in make_loader(source).batches(0):
        seen.update(zip(batch.indices.tolist(), batch.images, strict=True))
    for batch in make_loader(source, batch_size=5).batches(0):
        for index, image in zip(batch.indices.tolist(), batch.images, strict=True):
            if index in seen:
                torch.testing.assert_close(image, seen[index], rtol=0, atol=1e-5)


def test_epochs_and_seeds_differ_in_order_and_in_draws(source: ImageSource) -> None:
    first = make_loader(source)
    assert not torch.equal(first.order(0), first.order(1))
    assert not torch.equal(first.order(0), make_loader(source, seed=4).order(0))
    indices = torch.arange(4)
    images = torch.from_numpy(source.gather(np.arange(4)))
    looks = [first.assemble(indices, torch.tensor(epoch), images).images for epoch in (0, 1)]
    looks.append(make_loader(source, seed=4).assemble(indices, torch.tensor(0), images).images)
    assert torch.equal(looks[0], make_loader(source).assemble(indices, torch.tensor(0), images).images)
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert not torch.equal(looks[a], looks[b])


@given(st.integers(0, 30), st.integers(1, 12), st.integers(1, 4), st.booleans())
def test_training_sees_each_sample_once_but_for_the_last_short_batch(
    more: int, share: int, world: int, shuffle: bool
) -> None:
    batch, epoch = share * world, 5
    count = batch + more
    source = TensorImages(torch.zeros(count, 2, 2, 3, dtype=torch.uint8), np.arange(count))
    settings = {"batch_size": batch, "world": world, "shuffle": shuffle, "prefetch": 0}
    loaders = [make_loader(source, rank=rank, **settings) for rank in range(world)]
    seen = [index for loader in loaders for b in loader.batches(epoch) for index in b.indices.tolist()]
    assert len(set(seen)) == len(seen) == count // batch * batch
    assert {len(loader) for loader in loaders} == {count // batch}
    assert sorted(seen) == sorted(loaders[0].order(epoch)[: len(seen)].tolist())


@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 4))
def test_evaluation_sees_each_sample_exactly_once(count: int, share: int, world: int) -> None:
    source = TensorImages(torch.zeros(count, 2, 2, 3, dtype=torch.uint8), np.arange(count))
    seen = []
    for rank in range(world):
        settings = {"rank": rank, "world": world, "shuffle": False, "drop_last": False, "augmentation": None}
        loader = make_loader(source, batch_size=share * world, prefetch=0, **settings)
        batches = list(loader.batches(0))
        assert len(batches) == len(loader)
        assert all(len(batch.labels) > 0 for batch in batches)
        assert all(torch.equal(batch.indices, batch.labels) for batch in batches)
        seen += [index for batch in batches for index in batch.indices.tolist()]
    assert sorted(seen) == list(range(count))


def test_evaluation_only_normalises() -> None:
    images = torch.from_numpy(IMAGES)
    loader = make_loader(TensorImages(images, LABELS), augmentation=None, shuffle=False, drop_last=False)
    result = torch.cat([batch.images for batch in loader.batches(0)])
    expected = (images.permute(0, 3, 1, 2) / 255 - loader.mean[:, None, None]) / loader.std[:, None, None]
    assert torch.equal(result, expected)
    assert torch.equal(result, torch.cat([batch.images for batch in loader.batches(5)]))


@pytest.mark.parametrize("kind", ["mapped", "variable"])
def test_a_subset_offers_its_images_and_labels_alone(kind: str) -> None:
    chosen, pictures = [40, 3, 17, 4], Pictures(COUNT)
    source: Any = VariableImages(pictures, LABELS, chosen)
    if kind == "mapped":
        source, pictures.pictures = MappedImages(IMAGES, LABELS, chosen), list(IMAGES)
    assert len(source) == 4
    assert source.labels.tolist() == LABELS[chosen].tolist()
    for canvas, position in zip(source.gather(np.array([2, 0])), (17, 40), strict=True):
        image = pictures.image(position)
        assert np.array_equal(canvas[: image.shape[0], : image.shape[1]], image)


def test_sizes_come_from_an_index_where_there_is_one() -> None:
    pictures: Any = Pictures(COUNT)
    pictures.index = np.arange(3 * COUNT).reshape(COUNT, 3)
    assert np.array_equal(VariableImages(pictures, LABELS, [5, 6]).sizes, [[16, 17], [19, 20]])  # type: ignore[arg-type]


def refuses(word: str, build: Callable[..., Any], *arguments: Any, **settings: Any) -> None:
    with pytest.raises(UserError, match=word):
        build(*arguments, **settings)


def test_mistakes_are_refused() -> None:
    mapped, variable = MappedImages(IMAGES, LABELS), VariableImages(Pictures(COUNT), LABELS)
    refuses("multiple", make_loader, mapped, batch_size=0)
    refuses("multiple", make_loader, mapped, batch_size=9, world=2)
    refuses("do not fill", make_loader, mapped, batch_size=46)
    refuses("out of range", make_loader, mapped, rank=2, world=2)
    refuses("out of range", make_loader, mapped, prefetch=-1)
    refuses("3 values", make_loader, mapped, mean=(0.5,))
    refuses("positive", make_loader, mapped, std=(0.5, 0.0, 0.5))
    refuses("auto", make_loader, mapped, resident="sometimes")
    refuses("one size", make_loader, variable, resident=True)
    refuses("one output size", make_loader, variable, augmentation=RECIPE)
    refuses("step 6", next, make_loader(mapped).batches(0, 6))
    refuses("44 labels", MappedImages, IMAGES, LABELS[:44])
    refuses("uint8", MappedImages, IMAGES / 255, LABELS)
    refuses("leaves the 45 images", MappedImages, IMAGES, LABELS, [45])


@needs_gpu
def test_streamed_and_resident_batches_agree_on_the_gpu(source: ImageSource) -> None:
    expected = digests(make_loader(source, device="cuda", prefetch=0))
    for prefetch in (1, 4):
        assert digests(make_loader(source, device="cuda", prefetch=prefetch)) == expected
    if source.sizes is None:
        resident = make_loader(source, device="cuda", resident="auto")
        assert resident.resident_images is not None
        assert digests(resident) == expected
    for mine, theirs in zip(make_loader(source, device="cuda").batches(0), make_loader(source).batches(0), strict=True):
        torch.testing.assert_close(mine.images.cpu(), theirs.images, rtol=0, atol=1e-4)


@needs_gpu
def test_a_captured_graph_gives_the_batches_of_the_loader() -> None:
    loader = make_loader(MappedImages(IMAGES, LABELS), device="cuda", resident=True)
    indices = torch.zeros(BATCH, dtype=torch.int64, device="cuda")
    epoch = torch.zeros((), dtype=torch.int64, device="cuda")
    loader.assemble(indices, epoch)  # kernels are loaded before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = loader.assemble(indices, epoch)
    for number in range(2):
        epoch.fill_(number)
        for batch in loader.batches(number):
            indices.copy_(batch.indices)
            graph.replay()
            assert digest(captured) == digest(batch)
