"""Faults, put into a forked trial from outside: the package itself has no hook for any of them."""

import hashlib
import os
import signal
import time


def slow_steps(seconds):
    """Every training step takes this much longer, so that a signal finds the run inside it."""
    from bicovg.engine import EagerEngine

    plain = EagerEngine.train_batch

    def train_batch(self, batch, step):
        time.sleep(seconds)
        return plain(self, batch, step)

    EagerEngine.train_batch = train_batch


def hash_batches(path, stop_after=None):
    """Write the hash of every batch trained on; send SIGTERM to this process after step ``stop_after``.

    Step -1 stands for the moment before the first step of the process.
    """
    from bicovg.engine import EagerEngine
    from bicovg.trainer import Display

    plain, enter = EagerEngine.train_batch, Display.__enter__

    def train_batch(self, batch, step):
        losses = plain(self, batch, step)
        parts = (batch.indices, batch.images, batch.labels)
        digest = hashlib.sha256(b"".join(part.numpy().tobytes() for part in parts)).hexdigest()
        with open(path, "a") as file:
            file.write(f"{step} {digest}\n")
        if step == stop_after:
            os.kill(os.getpid(), signal.SIGTERM)
        return losses

    def enter_and_stop(self):
        if stop_after == -1:
            os.kill(os.getpid(), signal.SIGTERM)
        return enter(self)

    EagerEngine.train_batch, Display.__enter__ = train_batch, enter_and_stop


def record_operations(root, path):
    """Write every file operation below ``root`` to ``path`` when the process ends."""
    import pickle

    from disk import Recorder

    from bicovg.trainer import Trainer

    recorder, train = Recorder(root), Trainer.train
    recorder.begin()

    def train_and_write(self, stopper=None):
        try:
            return train(self, stopper)
        finally:
            with open(path, "wb") as file:
                pickle.dump(recorder.operations, file)

    Trainer.train = train_and_write


def kill_in_save(root, save, operation, when, share=0.0):
    """SIGKILL this process at one operation of its ``save``-th checkpoint, or of the next that has such an operation.

    ``operation`` is what ``disk.number_operations`` says. ``when`` is ``before``, ``after``, or ``inside``: after
    ``share`` of a write has been written.
    """
    from disk import Recorder, number_operations

    class Killer(Recorder):
        saves = 0

        def perform(self, done, act):
            kind, name, *rest = done
            if kind == "mkdir" and ".partial-" in name:
                self.saves, self.inside = self.saves + 1, []
            here = False
            if self.saves >= save and "checkpoints" in name:
                self.inside.append(done)
                here = number_operations(self.inside)[-1] == operation
            if here and when == "inside":
                act.func(act.args[0], rest[0][: int(len(rest[0]) * share)])
            if here and when != "after":
                os.kill(os.getpid(), signal.SIGKILL)
            result = act()
            if here:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

    Killer(root).begin()


def plant_value(site, block, value, at):
    """At step ``at``, put ``value`` (nan or inf) where planting.py says, or into the block's optimizer state."""
    from planting import plant

    from bicovg.engine import EagerEngine

    plain = EagerEngine.train_batch

    def train_batch(self, batch, step):
        if step != at:
            return plain(self, batch, step)
        if site == "optimizer state":
            part = next(b for unit in self.net.units for b in unit.blocks if b.index == block)
            state = next(o.state[part.conv.weight] for o in self.optimizers if part.conv.weight in o.state)
            next(tensor for tensor in state.values() if tensor.dim()).view(-1)[0] = float(value)
            return plain(self, batch, step)
        _, undo = plant(self.net, site, block, float(value))
        losses = plain(self, batch, step)
        undo()
        return losses

    EagerEngine.train_batch = train_batch


def limit_file_size(size):
    """No file of this process may grow beyond ``size`` bytes: the kernel refuses the write (EFBIG)."""
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def look_once():
    """``watch`` ends as if interrupted after it has looked once."""
    import types

    import bicovg.watch

    def sleep(seconds):
        raise KeyboardInterrupt

    bicovg.watch.time = types.SimpleNamespace(sleep=sleep)
