"""Writes docs/api.md: every public name with its signature, its docstring and the file it lives in."""

import inspect
from pathlib import Path

import bicovg

PAGE = Path(__file__).parent / "api.md"
INTRO = """# API

Every public name of `bicovg`. They are imported on first use, so `import bicovg` costs nothing. This page is written by
`make docs` from the docstrings.
"""


def describe(name: str) -> str:
    """One name's entry."""
    value = getattr(bicovg, name)
    home = value.__module__.replace(".", "/") + ".py"
    signature = str(inspect.signature(value)).replace("torch.nn.modules.module.", "nn.")
    text = inspect.cleandoc(value.__doc__ or "")
    return f"## {name}\n`{home}`\n\n```text\n{name}{shorten(signature)}\n```\n\n```text\n{text}\n```\n"


def shorten(signature: str) -> str:
    """Types as a reader names them."""
    for long, short in (
        ("torch.Tensor", "Tensor"),
        ("torch.optim.optimizer.Optimizer", "Optimizer"),
        ("collections.abc.", ""),
        ("jaxtyping.", ""),
        ("typing.", ""),
        ("bicovg.goodness.", ""),
        ("bicovg.layers.", ""),
        ("bicovg.blocks.", ""),
        ("bicovg.networks.", ""),
        ("bicovg.localization.", ""),
        ("bicovg.export.", ""),
    ):
        signature = signature.replace(long, short)
    return signature


def make_page() -> str:
    return INTRO + "\n" + "\n".join(describe(name) for name in sorted(bicovg.__all__, key=str.lower))


if __name__ == "__main__":
    PAGE.write_text(make_page())
