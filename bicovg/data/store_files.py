"""How a packed store lies on disk, and how it gets there whole or not at all.

``<root>/<name>/`` holds per split ``<split>.images`` (uint8, every image row-major H, W, RGB, one after the
other), ``<split>.labels`` (int32) and, when sizes differ, ``<split>.index`` (int64 rows: byte offset, height,
width), all little-endian; ``store.json``, the description with the hash of every file; and ``store.sha256``,
the hash of ``store.json``. A store being written is called ``<name>.partial-<pid>`` and renamed when it is all
on disk.
"""

import fcntl
import hashlib
import json
import os
import re
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bicovg.data.known import BUILT_IN, KNOWN
from bicovg.errors import UserError

SCHEMA = 1
MANIFEST = "store.json"
SEAL = "store.sha256"
PARTIAL = ".partial-"
Progress = Callable[[str, int, int], None]  # (what is being done, done, in all)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def data_root(explicit: str | None = None) -> Path:
    """Where stores live: what was asked for, else ``$BICOVG_DATA``, else ``./data``."""
    return Path(explicit or os.environ.get("BICOVG_DATA") or "data")


def check_name(name: str) -> str:
    """A store name is one plain folder name, so that it can never point outside the root."""
    if not _NAME.fullmatch(name) or PARTIAL in name:
        raise UserError(f"data set name {name!r} is not usable: use letters, digits, '-', '_' and '.'")
    if name in BUILT_IN:
        raise UserError(f"data set name {name!r} is that of a built-in set: choose another")
    return name


def pack_command(root: Path, name: str, options: str = "") -> str:
    """The command that packs ``name`` into ``root``, and what its PATH is, which only the user knows."""
    where = "" if root == data_root() else f" --root {shlex.quote(str(root))}"
    source = KNOWN[name].source if name in KNOWN else "a folder with train/ and test/, or with one folder per class"
    return f"`bicovg data pack {name} --from PATH{options}{where}`, PATH being {source}"


@contextmanager
def lock_name(root: Path, name: str) -> Iterator[None]:
    """One packing of ``name`` at a time. The lock ends with the process, however that ends; its empty file stays."""
    handle = os.open(root / f".{name}.lock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(handle)
        raise UserError(f"another process is packing {name} into {root}: wait for it") from error
    except OSError:
        pass  # a file system without locks
    try:
        yield
    finally:
        os.close(handle)


def is_store(folder: Path) -> bool:
    """Whether ``folder`` was made by the packer; it may be damaged."""
    return (folder / MANIFEST).is_file() or (folder / SEAL).is_file()


def list_partial(root: Path, name: str) -> list[Path]:
    """Folders of ``name`` that are not finished: left by an interrupted packing, unless one is running."""
    return sorted(root.glob(f"{name}{PARTIAL}*")) if root.is_dir() else []


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _write_synced(path: Path, content: bytes) -> None:
    with path.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def publish(partial: Path, target: Path, manifest: Mapping[str, Any]) -> None:
    """Seal the finished ``partial`` folder and rename it to ``target``, replacing a store that is there."""
    content = (json.dumps(manifest, indent=1, sort_keys=True) + "\n").encode("ascii")
    _write_synced(partial / MANIFEST, content)
    _write_synced(partial / SEAL, (hashlib.sha256(content).hexdigest() + "\n").encode("ascii"))
    _sync_folder(partial)
    replaced = target.with_name(f"{target.name}{PARTIAL}replaced-{os.getpid()}")
    if target.exists():
        os.rename(target, replaced)
    try:
        os.rename(partial, target)
    except BaseException:
        if replaced.exists():
            os.rename(replaced, target)
        raise
    _sync_folder(target.parent)
    if replaced.exists():
        shutil.rmtree(replaced)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The description of the store in ``folder``.

    Raises:
        ValueError: it is not what the packer wrote, with the reason; no other error whatever is there.
    """
    try:
        content, seal = (folder / MANIFEST).read_bytes(), (folder / SEAL).read_bytes()
    except OSError as error:
        raise ValueError(f"{Path(error.filename).name} cannot be read ({error.strerror})") from error
    if (hashlib.sha256(content).hexdigest() + "\n").encode("ascii") != seal:
        raise ValueError(f"{MANIFEST} and {SEAL} do not agree")
    manifest = json.loads(content)
    if not isinstance(manifest, dict) or manifest.get("schema") != SCHEMA:
        found = manifest.get("schema") if isinstance(manifest, dict) else None
        raise ValueError(f"its schema is {found}, this version reads {SCHEMA}")
    return manifest


def list_files(manifest: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """File name -> {bytes, sha256} over all splits."""
    return {name: entry for split in manifest["splits"].values() for name, entry in split["files"].items()}


def check_sizes(folder: Path, manifest: Mapping[str, Any]) -> list[str]:
    """Problems that need no reading: files that are missing, of the wrong size, or not of this store."""
    problems = []
    files = list_files(manifest)
    for name, entry in files.items():
        path = folder / name
        found = path.stat().st_size if path.is_file() else None
        if found != entry["bytes"]:
            state = "is missing" if found is None else f"has {found} bytes"
            problems.append(f"{name} {state}, {entry['bytes']} bytes were packed")
    extra = {path.name for path in folder.iterdir()} - set(files) - {MANIFEST, SEAL}
    return problems + [f"{name} is not part of the store" for name in sorted(extra)]


def verify_files(folder: Path, progress: Progress | None = None, limit: int | None = None) -> list[str]:
    """Read every byte of the store and list what is not as it was packed; an empty list is a whole store.

    Args:
        progress: called with ("read", bytes read, bytes in all).
        limit: leave out files larger than this.
    """
    try:
        manifest = read_manifest(folder)
        problems = check_sizes(folder, manifest)
    except ValueError as error:
        return [str(error)]
    files = {name: entry for name, entry in list_files(manifest).items() if (folder / name).is_file()}
    if limit is not None:
        files = {name: entry for name, entry in files.items() if entry["bytes"] <= limit}
    total, done = sum(entry["bytes"] for entry in files.values()), 0
    for name, entry in files.items():
        digest = hashlib.sha256()
        try:
            with (folder / name).open("rb") as stream:
                while block := stream.read(1 << 22):
                    digest.update(block)
                    done += len(block)
                    if progress is not None:
                        progress("read", done, total)
        except OSError as error:
            problems.append(f"{name} cannot be read ({error.strerror})")
            continue
        if digest.hexdigest() != entry["sha256"]:
            problems.append(f"{name} has changed since it was packed")
    return problems
