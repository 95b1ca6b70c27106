"""From an index to a batch on the device; order and augmentation are functions of (seed, epoch, index).

A data set that fits the device lives there as one uint8 tensor and a batch is a gather. Otherwise a thread
gathers from the memory map and, on a GPU, copies through pinned memory on a stream of its own; no worker
processes. Prefetch depth, resuming and the number of processes cannot change a batch, because nothing about
it depends on what was drawn before.
"""

import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from bicovg.data.augment import Augmentation, augment, make_constants
from bicovg.data.crops import Bytes, Whole
from bicovg.data.images import ImageSource, Indices, TensorImages
from bicovg.draws import AUGMENT, ORDER, draw_permutation, extend_keys, make_keys
from bicovg.errors import UserError

RESIDENT_SHARE = 0.6  # of the free device memory that a resident data set may take
COPY_BYTES = 1 << 26  # a data set moves to the device in pieces of this size


class Batch(NamedTuple):
    """Positions in the source, normalised float32 images (B, C, H, W) and labels, on the loader's device."""

    indices: Tensor
    images: Tensor
    labels: Tensor


def sample_keys(root: Int[Tensor, ""], epoch: int | Int[Tensor, ""], indices: Whole) -> Whole:
    """Keys of the samples' augmentation; ``root`` is ``make_keys(seed, AUGMENT)``.

    As device tensors, seed and epoch stay variable in what is compiled or captured.
    """
    return extend_keys(root, epoch, indices)


class Loader:
    """Batches of a source, augmented (None: only normalised), on ``device``.

    Global batch b is ``order(epoch)[b * batch_size : (b + 1) * batch_size]``; rank r of ``world`` takes its
    r-th contiguous share. ``drop_last=False`` keeps the last short batch, split as evenly as it goes; a rank
    whose share of it is empty has one batch fewer.

    Attributes:
        resident_images: the whole data set on the device, or None; ``resident`` takes another loader's.
        resident_labels: all labels, on the device.
        wait_seconds: time the consumer stood still for images: reading and copying that prefetch did not hide, on a
            CPU also augmentation. Near the run's own time, the loader holds it up.
    """

    def __init__(
        self,
        source: ImageSource,
        batch_size: int,
        *,
        seed: int,
        augmentation: Augmentation | None,
        mean: Sequence[float] | Tensor,
        std: Sequence[float] | Tensor,
        device: torch.device | str = "cpu",
        shuffle: bool = True,
        drop_last: bool = True,
        prefetch: int = 2,
        resident: bool | str | Tensor = "auto",
        rank: int = 0,
        world: int = 1,
    ) -> None:
        self.source, self.batch_size, self.seed, self.prefetch = source, batch_size, seed, prefetch
        self.augmentation = augmentation or Augmentation()
        self.shuffle, self.drop_last, self.rank, self.world = shuffle, drop_last, rank, world
        self.device = torch.empty(0, device=device).device  # "cuda" becomes "cuda:0"
        self.root = make_keys(seed, AUGMENT).to(self.device)  # a tensor, or each seed would be compiled anew
        self.mean = torch.as_tensor(mean, dtype=torch.float32, device=self.device)
        self.std = torch.as_tensor(std, dtype=torch.float32, device=self.device)
        self._check()
        self.constants = make_constants(self.augmentation, self.mean, self.std)
        self.resident_labels = source.labels.to(self.device)
        self.sizes = None if source.sizes is None else torch.from_numpy(source.sizes).to(self.device)
        self.resident_images = resident if isinstance(resident, Tensor) else self._make_resident(resident)
        self.copy_stream: Any = None
        if self.resident_images is None and self.device.type == "cuda":
            self.copy_stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self.wait_seconds = 0.0

    def _check(self) -> None:
        count, channels = len(self.source), self.source.batch_shape(np.arange(1))[3]
        if self.batch_size < 1 or self.batch_size % self.world:
            raise UserError(f"batch size {self.batch_size} must be a multiple of the {self.world} processes")
        if self.drop_last and count < self.batch_size:
            raise UserError(f"{count} images do not fill one batch: use a batch size of at most {count}")
        if self.prefetch < 0 or not 0 <= self.rank < self.world:
            raise UserError(f"prefetch {self.prefetch} or rank {self.rank} of {self.world} is out of range")
        mean, std = self.mean.tolist(), self.std.tolist()
        if len(mean) != channels or len(std) != channels or min(std) <= 0:
            raise UserError(f"mean {mean} and std {std} must hold {channels} values each, std positive")
        if self.source.sizes is not None and not self.augmentation.output_size:
            raise UserError("images of several sizes need one output size: set resized_crop or centre_crop")

    def _make_resident(self, resident: bool | str) -> Tensor | None:
        """The data set as one tensor on the device, where asked for or, on a GPU, where it fits."""
        source, count = self.source, len(self.source)
        if resident not in (True, False, "auto") or (resident is True and source.sizes is not None):
            raise UserError(f"resident {resident!r} must be 'auto' or False, or True for images of one size")
        if resident is False or source.sizes is not None:
            return None
        if isinstance(source, TensorImages) and source.tensor.device == self.device:
            return source.tensor
        shape = source.batch_shape(np.arange(1))[1:]
        size = int(np.prod(shape))
        if resident == "auto":
            free = torch.cuda.mem_get_info(self.device)[0] if self.device.type == "cuda" else 0
            if count * size >= RESIDENT_SHARE * free:
                return None
        images = torch.empty((count, *shape), dtype=torch.uint8, device=self.device)
        step = max(1, COPY_BYTES // size)
        for piece in np.split(np.arange(count), range(step, count, step)):
            images[piece[0] : piece[-1] + 1] = torch.from_numpy(source.gather(piece)).to(self.device)
        return images

    def share(self, step: int) -> tuple[int, int]:
        """Where this rank's part of global batch ``step`` begins and ends in the order."""
        begin = step * self.batch_size
        count = min(self.batch_size, len(self.source) - begin)
        return begin + self.rank * count // self.world, begin + (self.rank + 1) * count // self.world

    def __len__(self) -> int:
        steps = len(self.source) // self.batch_size
        begin, end = self.share(steps)
        return steps + (not self.drop_last and end > begin)

    def order(self, epoch: int) -> Int[Tensor, " n"]:
        """The epoch's order of all samples, on the CPU, the same on every rank."""
        n = len(self.source)
        return draw_permutation(n, self.seed, ORDER, epoch) if self.shuffle else torch.arange(n)

    def assemble(self, indices: Whole, epoch: int | Int[Tensor, ""], images: Bytes | None = None) -> Batch:
        """The batch at ``indices`` of the resident data, or of ``images``; fit for compile and capture."""
        if images is None:
            assert self.resident_images is not None, "no resident data set to take images from"
            images = self.resident_images.index_select(0, indices)
        sizes = None if self.sizes is None else self.sizes.index_select(0, indices)
        keys = sample_keys(self.root, epoch, indices)
        x = augment(images, keys, self.augmentation, self.constants, sizes)
        return Batch(indices, x, self.resident_labels.index_select(0, indices))

    def batches(self, epoch: int, start_step: int = 0, stride: int = 1) -> Generator[Batch, None, None]:
        """Every ``stride``-th of the epoch's batches from ``start_step`` on; close it to stop its thread early."""
        if not 0 <= start_step <= len(self):
            raise UserError(f"step {start_step} is not in an epoch of {len(self)} steps: resume the same run")
        order = self.order(epoch)
        on_device, host = order.to(self.device), self.device.type == "cpu"
        steps = range(start_step, len(self), stride)
        with closing(self._fetch_ahead(order.numpy(), iter(steps))) as fetched:
            for step in steps:
                began = time.perf_counter()
                images = next(fetched)
                waited = time.perf_counter()
                if self.copy_stream is not None:
                    images.record_stream(torch.cuda.current_stream(self.device))
                batch = self.assemble(on_device[slice(*self.share(step))], epoch, images)
                # a GPU's launches may stand in the queue behind the network's own: no time of the loader's
                self.wait_seconds += (time.perf_counter() if host else waited) - began
                yield batch

    def _fetch_ahead(self, order: Indices, steps: Iterator[int]) -> Generator[Any, None, None]:
        """What ``_fetch`` returns for each step, by a thread that is up to ``prefetch`` steps ahead.

        An error in the thread is raised here; closing this generator waits for the one gather under way.
        """
        if self.resident_images is not None or self.prefetch == 0:
            for step in steps:
                yield self._fetch(order, step)
            return
        pool = ThreadPoolExecutor(1, "bicovg-loader")
        try:
            ahead = deque(pool.submit(self._fetch, order, step) for step in islice(steps, self.prefetch))
            while ahead:
                ready = ahead.popleft().result()
                ahead.extend(pool.submit(self._fetch, order, step) for step in islice(steps, 1))
                yield ready
        finally:
            pool.shutdown(cancel_futures=True)

    def _fetch(self, order: Indices, step: int) -> Tensor | None:
        """A step's uint8 images, on the device when this returns; None where the data set lives there.

        Waiting for the copy here, off the main thread, lets the consumer's waiting tell the whole truth and bounds
        the pinned memory.
        """
        if self.resident_images is not None:
            return None
        indices = order[slice(*self.share(step))]
        # the canvas of the whole global batch, so that it does not depend on the number of ranks
        canvas = self.source.batch_shape(order[step * self.batch_size : (step + 1) * self.batch_size])[1:]
        shape = (len(indices), *canvas)
        if self.copy_stream is None:
            return torch.from_numpy(self.source.gather(indices, np.empty(shape, np.uint8)))
        with torch.cuda.stream(self.copy_stream):  # sets the thread's device, too
            host = torch.empty(shape, dtype=torch.uint8, pin_memory=True)
            self.source.gather(indices, host.numpy())
            images = host.to(self.device, non_blocking=True)
        self.copy_stream.synchronize()
        return images
