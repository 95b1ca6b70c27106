"""How torch is to keep house with a GPU's memory. No torch: these settings are read when it first uses one.

Of the 1.79 GB of a strict step at 224 px, 200 MB were workspaces of matrix products, 32 MiB for every thread and stream
on a Hopper GPU, and 90 MB gaps between blocks of memory. A setting that is there already stays.
"""

import os
import sys

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
SMALL, DETERMINISTIC = ":4096:2:16:8", ":4096:8"  # 8 MiB, what torch takes on other GPUs; one of two it calls so
ALLOCATORS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def spare_memory(deterministic: bool = False) -> None:
    """Small workspaces, and memory in segments that grow instead of many that do not fit together."""
    if os.environ.get(WORKSPACE) in (None, SMALL):
        os.environ[WORKSPACE] = DETERMINISTIC if deterministic else SMALL
    if sys.platform == "linux" and not any(name in os.environ for name in ALLOCATORS):
        os.environ[ALLOCATORS[1]] = "expandable_segments:True"
