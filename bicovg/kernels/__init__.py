"""Fused GPU kernels, each beside the plain function it must equal."""

import os

# Products and sums in one instruction: Triton 3.9 asks for the choice, and 3.10 would decide against it by default.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
