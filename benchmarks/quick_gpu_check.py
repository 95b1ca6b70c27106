"""Fused kernels against the plain definition in float64 on a few shapes: a minute-less smoke test for a GPU."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from bicovg.draws import make_keys
from bicovg.goodness import bicovg
from bicovg.kernels.goodness import fused_bicovg
from bicovg.kernels.tail import fused_tail
from bicovg.layers import keyed_dropout, rms_norm, rms_pool


def relative(a, b):
    return ((a.double() - b).norm() / b.norm()).item()


for C, H, scales in [(128, 32, (2, 4)), (256, 32, (1, 2)), (512, 8, (1, 2)), (512, 2, (1, 2)), (512, 7, (1, 2))]:
    for dtype in (torch.bfloat16, torch.float32):
        f = torch.randn(32, C, H, H, device="cuda").relu().to(dtype).contiguous(memory_format=torch.channels_last)
        f.requires_grad_()
        w = (torch.rand(C // 8, C, device="cuda") * 2 - 1).div(C**0.5).requires_grad_()
        g = fused_bicovg(f, w, scales)
        seed = torch.randn_like(g)
        df, dw = torch.autograd.grad(g, (f, w), seed)
        f64, w64 = f.detach().double().requires_grad_(), w.detach().to(dtype).double().requires_grad_()
        ref = bicovg(f64, w64, scales)
        rdf, rdw = torch.autograd.grad(ref, (f64, w64), seed.double())
        keys = make_keys(torch.arange(32, device="cuda"))
        tails = []
        for pool in (False, True):
            x = rms_pool(f64.detach()) if pool else f64.detach()
            want = rms_norm(keyed_dropout(x, 0.1, keys))
            got = fused_tail(f.detach(), pool, 0.1, keys)
            tails.append(relative(got, want) if want.numel() else 0.0)
        print(
            f"C {C} H {H} {scales} {str(dtype)[6:]:9} g {relative(g, ref):.1e} df {relative(df, rdf):.1e} "
            f"dW {relative(dw, rdw):.1e} tail {tails[0]:.1e} {tails[1]:.1e}"
        )
