"""The bytes of a safetensors file, put together without stopping other threads.

``safetensors.torch.save`` makes the same bytes, but holds the interpreter's lock while it copies them: for a large
network that is long enough for a GPU to run out of work. Here torch copies, which lets go of the lock.
"""

import json
from collections.abc import Mapping
from itertools import accumulate, pairwise

import torch
from torch import Tensor

# their names in a file, in the order in which they lie there: wide ones first, so that all are aligned
_TYPES = {
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float32: "F32",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_RANK = {dtype: rank for rank, dtype in enumerate(_TYPES)}


def assemble_tensors(tensors: Mapping[str, Tensor]) -> memoryview:
    """The file that holds these tensors of the host, byte for byte what ``safetensors.torch.save`` would make."""
    names = sorted(tensors, key=lambda name: (_RANK[tensors[name].dtype], name))
    ends = list(accumulate((tensors[name].nbytes for name in names), initial=0))
    header = {
        name: {
            "dtype": _TYPES[tensors[name].dtype],
            "shape": list(tensors[name].shape),
            "data_offsets": [begin, end],
        }
        for name, (begin, end) in zip(names, pairwise(ends), strict=True)
    }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    whole = torch.empty(start + ends[-1], dtype=torch.uint8)
    whole[:start] = torch.frombuffer(bytearray(len(text).to_bytes(8, "little") + text), dtype=torch.uint8)
    for name, (begin, end) in zip(names, pairwise(ends), strict=True):
        if end > begin:
            own = whole[start + begin : start + end].view(tensors[name].dtype)
            own.view(tensors[name].shape).copy_(tensors[name])
    return whole.numpy().data
