"""The built-in digits: 1,797 real 8x8 handwritten digits that ship with the package (see digits.txt)."""

from importlib import resources

import numpy as np
from numpy.typing import NDArray

TEST_SHARE = 0.2
SPLIT_SEED = 0  # one fixed split, whatever the training seed


def load_digits() -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Images (1797, 8, 8, 1) uint8 and labels."""
    with resources.files("bicovg.data").joinpath("digits.npz").open("rb") as file:
        archive = np.load(file, allow_pickle=False)
        return archive["images"], archive["labels"].astype(np.int64)
