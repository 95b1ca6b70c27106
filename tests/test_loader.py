"""Batches are functions of (seed, epoch, index): not of prefetch, resume, residency or the number of processes."""

import gc
import hashlib
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bicovg.data.augment import Augmentation
from bicovg.data.loader import Batch, ImageSource, Loader, MappedImages, TensorImages, VariableImages
from bicovg.errors import UserError

RECIPE = Augmentation(crop_pad=2, flip=True, brightness=0.4, contrast=0.4, saturation=0.4, grayscale=0.2)
CROPS = Augmentation(resized_crop=8, flip=True, brightness=0.4)
COUNT, BATCH = 45, 8
IMAGES = np.random.default_rng(1).integers(0, 256, (COUNT, 10, 12, 3), dtype=np.uint8)
LABELS = np.arange(COUNT) * 7 % 10
STATISTICS: dict[str, Any] = {"mean": (0.5, 0.4, 0.3), "std": (0.2, 0.2, 0.3)}
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


class Pictures:
    """Images of several sizes, by position."""

    def __init__(self, count: int) -> None:
        generator = np.random.default_rng(0)
        sizes = generator.integers(9, 50, (count, 2))
        self.pictures = [generator.integers(0, 256, (h, w, 3), dtype=np.uint8) for h, w in sizes]

    def image(self, i: int) -> np.ndarray:
        return self.pictures[i]


class Faulty(MappedImages):
    """Counts its gathers, is slow, and fails at the one numbered ``fail_at``."""

    def __init__(self, fail_at: int = -1, seconds: float = 0.0) -> None:
        super().__init__(IMAGES, LABELS)
        self.fail_at, self.seconds, self.gathers = fail_at, seconds, 0

    def gather(self, indices: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        time.sleep(self.seconds)
        self.gathers += 1
        if self.gathers == self.fail_at + 1:
            raise OSError("the disk went away")
        return super().gather(indices, out)


def make_source(kind: str, folder: Path) -> ImageSource:
    if kind == "tensor":
        return TensorImages(torch.from_numpy(IMAGES), torch.from_numpy(LABELS))
    if kind == "variable":
        return VariableImages(Pictures(COUNT), LABELS)
    np.save(folder / "images.npy", IMAGES)
    return MappedImages(np.load(folder / "images.npy", mmap_mode="r"), LABELS)


def make_loader(source: ImageSource, **changes: Any) -> Loader:
    augmentation = CROPS if source.sizes is not None else RECIPE
    settings = {"seed": 3, "augmentation": augmentation, "resident": False, **STATISTICS, **changes}
    return Loader(source, settings.pop("batch_size", BATCH), **settings)


def digest(batch: Batch) -> str:
    parts = [tensor.cpu().contiguous().numpy().tobytes() for tensor in batch]
    return hashlib.sha256(b"".join(parts)).hexdigest()


def digests(loader: Loader, epoch: int = 0, start_step: int = 0) -> list[str]:
    return [digest(batch) for batch in loader.batches(epoch, start_step)]


def loader_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("bicovg-loader")]


@pytest.fixture(autouse=True)
def _threads_end() -> Any:
    yield
    assert loader_threads() == []


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


def test_an_error_in_the_thread_reaches_the_consumer_at_its_step() -> None:
    for prefetch in (0, 1, 4):
        batches = make_loader(Faulty(fail_at=3), prefetch=prefetch).batches(0)
        assert len([next(batches) for _ in range(3)]) == 3
        with pytest.raises(OSError, match="the disk went away"):
            next(batches)
        assert loader_threads() == []


def test_closing_or_dropping_the_iterator_ends_the_thread() -> None:
    loader = make_loader(Faulty(seconds=0.01), prefetch=3)
    batches = loader.batches(0)
    next(batches)
    assert len(loader_threads()) == 1
    batches.close()
    assert loader_threads() == []
    for _ in loader.batches(0):
        break
    gc.collect()
    assert loader_threads() == []


@pytest.mark.parametrize("prefetch", [1, 2, 4])
def test_the_thread_stays_within_the_prefetch_depth(prefetch: int) -> None:
    source = Faulty()
    batches = make_loader(source, prefetch=prefetch, batch_size=4).batches(0)
    for consumed in range(1, 5):
        next(batches)
        time.sleep(0.05)
        assert source.gathers == consumed + prefetch
    batches.close()


def test_waiting_is_counted() -> None:
    loader = make_loader(Faulty(seconds=0.02))
    assert loader.wait_seconds == 0
    digests(loader)
    assert loader.wait_seconds > 0.02


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
