"""A disk that loses power: every file operation is recorded, and any prefix of them can be replayed as a crash.

The recorder wraps the calls of ``os`` and passes them on; the replay knows what had been synced at that moment. A
write is safe after the file's fsync, a name (create, rename, remove) after its folder's fsync; what is not safe may be
lost or kept, each on its own. Four crashes are tried after every operation:

* ``strict``: nothing unsynced survives;
* ``names``: every name survives and no unsynced byte (a rename that overtakes the data it names);
* ``all``: everything survives (a killed process);
* ``mixed``: a seeded choice among the unsynced names and bytes.
"""

import os
import random
import re
from collections import Counter
from contextlib import contextmanager
from functools import partial
from pathlib import Path

CRASHES = ("strict", "names", "all", "mixed")


def number_operations(operations):
    """Each as text: its kind, its file's name without numbers, and how often that has been before.

    Saves differ in their steps, and in what they write or retire: a place in the list would mean now this, now that.
    """
    seen, numbered = Counter(), []
    for kind, name, *_ in operations:
        label = f"{kind} {re.sub('[0-9]+', '#', os.path.basename(name))}"
        numbered.append(f"{label} {seen[label]}")
        seen[label] += 1
    return numbered


class Recorder:
    """The operations on files below ``root``, in order."""

    def __init__(self, root):
        self.root, self.operations, self.handles = os.path.abspath(root), [], {}

    def perform(self, operation, act):
        """Carry out an operation and note it; ``act`` makes the call of ``os``."""
        result = act()
        self.operations.append(operation)
        return result

    def path(self, path, folder=None):
        """Relative to the root, or None if outside."""
        text = os.fspath(path)
        if folder is not None and folder not in self.handles:
            return None
        whole = os.path.abspath(text if folder is None else os.path.join(self.root, self.handles[folder], text))
        if whole != self.root and not whole.startswith(self.root + os.sep):
            return None
        return os.path.relpath(whole, self.root)

    def begin(self):
        for name, wrapper in self.wrappers().items():
            setattr(os, name, wrapper(getattr(os, name)))

    @contextmanager
    def recording(self):
        plain = {name: getattr(os, name) for name in self.wrappers()}
        self.begin()
        try:
            yield self
        finally:
            for name, function in plain.items():
                setattr(os, name, function)

    def wrappers(self):
        return {
            "open": self._open,
            "close": self._close,
            "write": self._by_handle("write"),
            "fsync": self._by_handle("fsync"),
            "ftruncate": self._by_handle("truncate"),
            "mkdir": self._by_name("mkdir"),
            "unlink": self._by_name("unlink"),
            "rmdir": self._by_name("rmdir"),
            "rename": self._rename,
            "replace": self._rename,
        }

    def _open(self, plain):
        def call(path, flags, mode=0o777, *, dir_fd=None):
            known = self.path(path, dir_fd)
            new = known is not None and flags & os.O_CREAT and not os.path.lexists(os.path.join(self.root, known))
            act = partial(plain, path, flags, mode, dir_fd=dir_fd)
            handle = self.perform(("create", known), act) if new else act()
            if known is not None:
                self.handles[handle] = known
            return handle

        return call

    def _close(self, plain):
        def call(handle):
            self.handles.pop(handle, None)
            plain(handle)

        return call

    def _by_handle(self, kind):
        def wrap(plain):
            def call(handle, *rest):
                act = partial(plain, handle, *rest)
                if handle not in self.handles:
                    return act()
                values = [bytes(value) if kind == "write" else value for value in rest]
                return self.perform((kind, self.handles[handle], *values), act)

            return call

        return wrap

    def _by_name(self, kind):
        def wrap(plain):
            def call(path, *rest, dir_fd=None):
                known = self.path(path, dir_fd)
                act = partial(plain, path, *rest, **({} if dir_fd is None else {"dir_fd": dir_fd}))
                return act() if known is None else self.perform((kind, known), act)

            return call

        return wrap

    def _rename(self, plain):
        def call(source, target):
            known, act = self.path(target), partial(plain, source, target)
            return act() if known is None else self.perform(("rename", self.path(source), known), act)

        return call


class File:
    def __init__(self):
        self.content = self.synced = b""


class Folder:
    """Entries now, entries as of the last fsync, and the unsynced changes in between."""

    def __init__(self):
        self.entries, self.synced, self.pending = {}, {}, []

    def change(self, **entries):
        for name, node in entries.items():
            if node is None:
                self.entries.pop(name, None)
            else:
                self.entries[name] = node
        self.pending.append(entries)


class Disk:
    """What is on the disk, and what is only in its cache, while operations are replayed."""

    def __init__(self):
        self.root = Folder()

    def find(self, path):
        node = self.root
        for part in Path(path).parts:
            node = node.entries[part]
        return node

    def replay(self, operation):
        kind, path, *rest = operation
        parent, name = self.find(Path(path).parent), Path(path).name
        if kind in ("create", "mkdir"):
            parent.change(**{name: File() if kind == "create" else Folder()})
        elif kind in ("unlink", "rmdir"):
            parent.change(**{name: None})
        elif kind == "rename":
            assert Path(rest[0]).parent == Path(path).parent, "a rename across folders is not modelled"
            parent.change(**{name: None, Path(rest[0]).name: parent.entries[name]})
        elif kind == "write":
            self.find(path).content += rest[0]
        elif kind == "truncate":
            self.find(path).content = self.find(path).content[: rest[0]].ljust(rest[0], b"\0")
        else:
            self._sync(self.find(path))

    def _sync(self, node):
        if isinstance(node, File):
            node.synced = node.content
        else:
            node.synced, node.pending = dict(node.entries), []

    def crash(self, kind, target, seed=0):
        """Write into ``target`` what a crash of this kind leaves."""
        self._leave(self.root, Path(target), kind, random.Random(seed))

    def _leave(self, node, path, kind, rng):
        if isinstance(node, File):
            path.write_bytes(self._surviving_bytes(node, kind, rng))
            return
        path.mkdir(exist_ok=True)
        for name, child in self._surviving_names(node, kind, rng).items():
            self._leave(child, path / name, kind, rng)

    def _surviving_bytes(self, file, kind, rng):
        if kind == "all":
            return file.content
        if kind == "mixed" and file.content != file.synced:
            return file.content[: rng.randint(0, len(file.content))]
        return file.synced

    def _surviving_names(self, folder, kind, rng):
        if kind in ("all", "names"):
            return folder.entries
        entries = dict(folder.synced)
        for change in folder.pending if kind == "mixed" else ():
            if rng.random() < 0.5:
                for name, node in change.items():
                    entries.pop(name, None)
                    if node is not None:
                        entries[name] = node
        return entries
