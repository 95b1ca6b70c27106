"""Checkpoints on disk: a folder of safetensors and JSON, whole or absent. Nothing executes on load.

``checkpoints/step-S-epoch-E/`` is written as ``.partial-...``: every file synced, the manifest (size and SHA-256 of
every file) last, then the folder, then renamed, then the parent synced. It is read back and verified before an older
one goes; at least two that verify are kept. There is no pointer to the latest: it is the newest that verifies.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from bicovg.durable import discard, open_regular, read_regular, sync_folder, write_synced
from bicovg.errors import StorageError

SCHEMA = 2
KEEP = 2
FOLDER = "checkpoints"
MANIFEST = "manifest.json"
MODEL, OPTIMIZER, PROGRESS, METRICS = FILES = (
    "model.safetensors",
    "optimizer.safetensors",
    "progress.json",
    "metrics.jsonl",
)
MAX_FILE = 16 << 30
MAX_JSON = 1 << 16
_NAME = re.compile(r"step-[0-9]{9,12}-epoch-[0-9]{4,8}")
T = TypeVar("T")
Blob = bytes | memoryview


class Unusable(Exception):
    """Why a checkpoint cannot be used."""


def checkpoint_name(step: int, epoch: int) -> str:
    """Sorts by age: a step may be saved before and after its epoch is closed."""
    return f"step-{step:09d}-epoch-{epoch:04d}"


def write_checkpoint(run: Path, name: str, files: Mapping[str, Blob], keep: int = KEEP) -> Path:
    """Write, sync, rename, verify; then remove what is older than the newest ``keep`` that verify."""
    folder = run / FOLDER
    if not folder.is_dir():
        os.mkdir(folder)
    sync_folder(run)  # every time: a process that was killed may have made the folder and not synced it
    _refuse_link(folder)
    _sweep(folder)
    final = folder / name
    if verify_checkpoint(final) is None:
        return final  # the same step again: the state is the same
    partial, refused = folder / f".partial-{name}", folder / f".trash-{name}"
    os.mkdir(partial)
    for file, blob in files.items():
        write_synced(partial / file, blob)
    write_synced(partial / MANIFEST, make_manifest(files))
    sync_folder(partial)
    if os.path.lexists(final):  # one of this name that did not verify
        os.rename(final, refused)
    os.rename(partial, final)
    sync_folder(folder)
    reason = verify_checkpoint(final)
    if reason is not None:
        raise StorageError(f"{final} was not stored as it was written, {reason}: check the disk; older ones are kept")
    discard(refused)
    retire_checkpoints(run, keep)
    return final


def make_manifest(files: Mapping[str, Blob]) -> bytes:
    listed = {name: {"bytes": len(blob), "sha256": hashlib.sha256(blob).hexdigest()} for name, blob in files.items()}
    return _render({"schema": SCHEMA, "files": listed})


def _render(manifest: Mapping[str, Any]) -> bytes:
    return (json.dumps(manifest, indent=2) + "\n").encode()


def retire_checkpoints(run: Path, keep: int) -> None:
    """Remove all that are older than the newest ``keep`` that verify; each vanishes whole, by a rename."""
    found, good = list_checkpoints(run), 0
    while found and good < max(keep, KEEP):
        good += verify_checkpoint(found.pop()) is None
    trash = [path.with_name(f".trash-{path.name}") for path in found]
    for path, gone in zip(found, trash, strict=True):
        os.rename(path, gone)
    if trash:
        sync_folder(run / FOLDER)  # before the files go, or a crash could leave a torn checkpoint under its old name
    for gone in trash:
        discard(gone)


def _sweep(folder: Path) -> None:
    """What a killed process left half written or half removed."""
    for pattern in (".partial-*", ".trash-*"):
        for path in folder.glob(pattern):
            discard(path)


def _refuse_link(folder: Path) -> None:
    if folder.is_symlink():
        raise StorageError(f"{folder} is a symbolic link: checkpoints must lie inside their run folder")


def list_checkpoints(run: Path) -> list[Path]:
    """Oldest first; usable or not."""
    folder = run / FOLDER
    if not folder.is_dir() or folder.is_symlink():
        return []
    return sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name))


def read_manifest(path: Path) -> dict[str, Any]:
    """Name -> {bytes, sha256} of exactly the expected files, or ``Unusable``."""
    if path.is_symlink():
        raise Unusable("it is a symbolic link")
    try:
        blob = read_regular(path / MANIFEST, MAX_JSON)
        manifest = json.loads(blob)
        schema, files = manifest["schema"], manifest["files"]
        if type(schema) is not int or schema != SCHEMA:
            raise Unusable(f"its schema is {schema!r:.40}, this version reads {SCHEMA}")
        if not isinstance(files, dict) or set(files) != set(FILES):
            raise Unusable(f"its manifest lists {list(files)!r:.80}")
        for entry in files.values():
            if type(entry["bytes"]) is not int or type(entry["sha256"]) is not str:
                raise Unusable("its manifest is malformed")
        if _render(manifest) != blob:
            raise Unusable("its manifest is not as it was written")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise Unusable(f"{MANIFEST}: {_explain(error)}") from None
    return dict(files)


def read_checked(path: Path, name: str, limit: int = MAX_FILE) -> bytes:
    """One file of a checkpoint, if it is what the manifest says, or ``Unusable``."""
    expected = read_manifest(path)[name]
    try:
        blob = read_regular(path / name, min(limit, MAX_FILE))
    except OSError as error:
        raise Unusable(f"{name}: {_explain(error)}") from None
    _compare(name, len(blob), hashlib.sha256(blob).hexdigest(), expected)
    return blob


def verify_checkpoint(path: Path) -> str | None:
    """Why this checkpoint cannot be used, or None. Reads every byte, keeps none."""
    try:
        for name, expected in read_manifest(path).items():
            try:
                size, digest = _hash_file(path / name)
            except OSError as error:
                raise Unusable(f"{name}: {_explain(error)}") from None
            _compare(name, size, digest, expected)
    except Unusable as reason:
        return str(reason)
    return None


def _hash_file(path: Path) -> tuple[int, str]:
    descriptor, size = open_regular(path, MAX_FILE)
    with os.fdopen(descriptor, "rb") as file:
        return size, hashlib.file_digest(file, "sha256").hexdigest()


def _compare(name: str, size: int, digest: str, expected: Mapping[str, Any]) -> None:
    if size != expected["bytes"]:
        raise Unusable(f"{name} has {size} bytes, the manifest says {expected['bytes']}")
    if digest != expected["sha256"]:
        raise Unusable(f"{name} does not match its checksum")


def _explain(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return str(error) if isinstance(error, OSError) else f"not valid ({type(error).__name__})"


def walk_back(run: Path, load: Callable[[Path], T]) -> tuple[Path | None, T | None, list[str]]:
    """The newest checkpoint that verifies and that ``load`` takes, what it gave, and a line for each one skipped."""
    skipped: list[str] = []
    for path in reversed(list_checkpoints(run)):
        reason = verify_checkpoint(path)
        if reason is None:
            try:
                return path, load(path), skipped
            except Unusable as error:
                reason = str(error)
        skipped.append(f"skipped {path.name}: {reason}")
    return None, None, skipped


def find_checkpoint(run: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint that verifies, and a line for each that was skipped."""
    path, _, skipped = walk_back(run, lambda path: path)
    return path, skipped
