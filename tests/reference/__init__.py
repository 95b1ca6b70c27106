"""Slow textbook versions, one Python loop per index of the formula, used as oracles.

They share no code with the package and take no short cut: float64 throughout, one element at a time.
"""

from collections.abc import Callable

import torch
from torch import Tensor


def random_tensor(seed: int, *shape: int) -> Tensor:
    """Float64 normal values that depend on ``seed`` alone."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def assert_matches(function: Callable[..., Tensor], textbook: Callable[..., Tensor], *inputs: Tensor) -> None:
    """``function`` has the textbook's value, and for every input the gradient finite differences give."""
    leaves = tuple(x.detach().clone().requires_grad_() for x in inputs)
    torch.testing.assert_close(function(*leaves), textbook(*inputs), rtol=1e-11, atol=1e-12)
    assert torch.autograd.gradcheck(function, leaves)
