"""Mutated checkpoint headers, manifests and configs: each is read or refused, quickly and in little memory.

Run as ``fuzz.py RUN COUNT SEED``: prints what it did as JSON. RUN is a folder with a good checkpoint, which is copied.
"""

import copy
import json
import random
import shutil
import sys
import time
from pathlib import Path

import torch

from bicovg.checkpoint import (
    FILES,
    MANIFEST,
    MODEL,
    OPTIMIZER,
    PROGRESS,
    Unusable,
    list_checkpoints,
    make_manifest,
    read_manifest,
    verify_checkpoint,
)
from bicovg.config import from_json
from bicovg.errors import UserError
from bicovg.optim import make_optimizers
from bicovg.preparation import build_on, check_config
from bicovg.state import load_state

EDGES = [0, -1, 1, 2, 255, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64, -(2**63), 10**30, 1e308, -0.0]
EDGES += [True, False, None, "", "strict", "\x00", "../../x", "A" * 5000, [], {}, [[]], [10**9] * 4, {"a": {"b": 1}}]
EDGES += [float("nan"), float("inf"), 0.1, "1", "\ud800", [1] * 300]
PIECES = [b"\x00", b"\xff", b"{", b"}", b"[", b"]", b'"', b"9" * 40, b":", b",", b"NaN", b"[" * 3000, b"\\ud800", b"-"]


def mutate_bytes(blob, rng):
    """A few flips, cuts, repeats and insertions."""
    data = bytearray(blob)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data)) if data else 0
        kind = rng.randrange(5)
        if kind == 0 and data:
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            data[at:at] = rng.choice(PIECES)
        elif kind == 2:
            del data[at : at + rng.choice([1, 8, 100, 10**6])]
        elif kind == 3:
            data[at:at] = data[at : at + rng.choice([1, 8, 100])]
        elif data:
            data[at : at + 8] = rng.choice([0, 2**64 - 1, 2**63, 10**8, 10**12]).to_bytes(8, "little")
    return bytes(data)


def places(tree, path=()):
    """The path of every value in a JSON tree."""
    yield path
    inside = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in inside:
        yield from places(value, (*path, key))


def mutate_tree(tree, rng):
    """Replace, drop, rename or add values of a JSON tree."""
    tree = json.loads(json.dumps(tree))
    for _ in range(rng.randint(1, 3)):
        found = [path for path in places(tree) if path]
        if not found:
            break
        *parents, key = rng.choice(found)
        node = tree
        for parent in parents:
            node = node[parent]
        kind = rng.randrange(4)
        if kind == 0 or isinstance(node, list):
            node[key] = copy.deepcopy(rng.choice(EDGES))
        elif kind == 1:
            del node[key]
        elif kind == 2:
            node[f"{key}x"] = node.pop(key)
        else:
            node[rng.choice(["extra", "__class__", ""])] = copy.deepcopy(rng.choice(EDGES))
    return tree


class Target:
    """A copy of a run whose files are mutated and put back."""

    def __init__(self, run, scratch):
        shutil.copytree(run, scratch)
        self.checkpoint = list_checkpoints(scratch)[-1]
        self.whole = {name: (self.checkpoint / name).read_bytes() for name in (*FILES, MANIFEST)}
        self.owner = json.loads(self.whole[MANIFEST])["owner"]
        self.config_text = (scratch / "config.json").read_text()
        self.config = from_json(self.config_text)
        self.net = build_on(self.config, torch.device("cpu"))
        self.optimizers = make_optimizers(self.net, self.config.optim, torch.device("cpu"))
        self.losses = torch.zeros(2, len(self.net.exits), dtype=torch.float64)

    def put(self, name, blob, sealed):
        (self.checkpoint / name).write_bytes(blob)
        if sealed:
            files = {file: (self.checkpoint / file).read_bytes() for file in FILES}
            (self.checkpoint / MANIFEST).write_bytes(make_manifest(files, self.owner))

    def restore(self):
        for name, blob in self.whole.items():
            (self.checkpoint / name).write_bytes(blob)

    def load(self):
        """Read the checkpoint as a resume does; True if it was taken."""
        if verify_checkpoint(self.checkpoint) is not None:
            return False
        load_state(self.checkpoint, self.net, self.optimizers, self.losses, self.config.train.epochs, 4)
        return True

    def try_header(self, rng):
        """A mutated tensor file or progress, its checksum made right so that the parser sees it."""
        name = rng.choice([MODEL, OPTIMIZER, MODEL, OPTIMIZER, PROGRESS])
        blob = self.whole[name]
        if name == PROGRESS:
            changed = json.dumps(mutate_tree(json.loads(blob), rng)).encode()
        elif rng.random() < 0.5:
            size = int.from_bytes(blob[:8], "little")
            header = json.dumps(mutate_tree(json.loads(blob[8 : 8 + size]), rng)).encode()
            changed = len(header).to_bytes(8, "little") + header + blob[8 + size :]
        else:
            changed = mutate_bytes(blob[:4000], rng) + blob[4000:]
        self.put(name, changed, sealed=True)
        return self.load()

    def try_manifest(self, rng):
        blob = self.whole[MANIFEST]
        tree = json.dumps(mutate_tree(json.loads(blob), rng), indent=2).encode() + b"\n"
        self.put(MANIFEST, tree if rng.random() < 0.5 else mutate_bytes(blob, rng), sealed=False)
        read_manifest(self.checkpoint)
        return self.load()

    def try_config(self, rng):
        if rng.random() < 0.8:
            text = json.dumps(mutate_tree(json.loads(self.config_text), rng))
        else:
            text = mutate_bytes(self.config_text.encode(), rng).decode(errors="replace")
        check_config(from_json(text))
        return True


def peak_megabytes():
    """Of this process; not ru_maxrss, which a process inherits from the one that started it."""
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) / 1024


def fuzz(run, count, seed):
    rng, scratch = random.Random(seed), Path(run).with_name("fuzzed")
    target = Target(run, scratch)
    assert target.load()
    before = peak_megabytes()  # torch by itself takes 600 MB in a build for CUDA
    result = {"tried": 0, "taken": 0, "refused": 0, "slowest": 0.0, "failures": []}
    for number in range(count):
        attempt = (target.try_header, target.try_manifest, target.try_config)[number % 3]
        begun = time.process_time()  # of this process alone: a busy machine is not a hang
        try:
            result["taken" if attempt(rng) else "refused"] += 1
        except (Unusable, UserError):
            result["refused"] += 1
        except Exception as error:
            result["failures"].append(f"case {number}, {attempt.__name__}: {type(error).__name__}: {error}"[:300])
        result["slowest"] = max(result["slowest"], time.process_time() - begun)
        result["tried"] += 1
        target.restore()
    result["megabytes"] = peak_megabytes() - before
    shutil.rmtree(scratch)
    return result


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(fuzz(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
