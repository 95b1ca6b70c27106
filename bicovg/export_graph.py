"""torch.export and ONNX files of a module, with any batch size, and how to run them for a comparison."""

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.export import ExportedProgram

from bicovg.errors import UserError

Run = Callable[[Tensor], NDArray[np.float32]]
ANY_BATCH = {"images": {0: torch.export.Dim("batch")}}


@contextmanager
def quiet() -> Iterator[None]:
    """The exporters' own deprecations and their notes on packages that are not there concern no user."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def trace(module: nn.Module, example: Tensor) -> ExportedProgram:
    """The module as a graph for any batch size; both formats are written from it."""
    with quiet(), torch.no_grad():
        return torch.export.export(module, (example,), dynamic_shapes=ANY_BATCH)


def write_torch(program: ExportedProgram, folder: Path) -> Path:
    """``model.pt2``."""
    path = folder / "model.pt2"
    with quiet():
        torch.export.save(program, path)
    return path


def open_torch(path: Path) -> Run:
    with quiet():
        module = torch.export.load(path).module()

    def run(images: Tensor) -> NDArray[np.float32]:
        with torch.no_grad():
            result: Tensor = module(images)
        return result.numpy()

    return run


def write_onnx(program: ExportedProgram, folder: Path) -> Path:
    """``model.onnx``: input ``images``, output ``logits``."""
    try:
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError:
        raise UserError("ONNX needs pip install 'bicovg[export]'; or leave it out with --format hub,torch") from None
    path = folder / "model.onnx"
    with quiet(), torch.no_grad():
        made: Any = torch.onnx.export(
            program,
            (),
            dynamo=True,
            dynamic_shapes=ANY_BATCH,
            input_names=["images"],
            output_names=["logits"],
            verbose=False,
        )
        made.save(str(path), external_data=False)
    return path


def open_onnx(path: Path) -> Run:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])

    def run(images: Tensor) -> NDArray[np.float32]:
        result: NDArray[np.float32] = session.run(None, {"images": images.numpy()})[0]
        return result

    return run
