"""Checkpoints on disk: a folder of safetensors and JSON, whole or absent. Nothing executes on load.

``checkpoints/step-S-epoch-E/`` is written as ``.partial-...``: every file synced, the manifest (size and SHA-256 of
every file, and the owner: a name of the settings of the run) last, then the folder, then renamed, then the parent
synced. It is read back and verified before an older one goes; at least two that verify are kept. There is no pointer to
the latest: it is the newest that verifies. One of another owner does not verify.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

from bicovg.durable import discard, open_regular, read_regular, sync_folder, write_synced
from bicovg.errors import StorageError

SCHEMA = 3
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


def write_checkpoint(
    run: Path,
    name: str,
    files: Mapping[str, Blob],
    keep: int = KEEP,
    owner: str = "",
    unfit: Collection[str] = (),
) -> Path:
    """Write, sync, rename, verify; then remove what is older than the newest ``keep`` that verify.

    Args:
        unfit: names of checkpoints that verify, but that their run could not take: they do not count.
    """
    folder = run / FOLDER
    if not os.path.lexists(folder):
        os.mkdir(folder)
    sync_folder(run)  # every time: a process that was killed may have made the folder and not synced it
    refuse_other(folder)
    _sweep(folder)
    final = folder / name
    if name not in unfit and verify_checkpoint(final, owner) is None:
        return final  # the same step again: the state is the same
    partial, refused = folder / f".partial-{name}", folder / f".trash-{name}"
    os.mkdir(partial)
    for file, blob in files.items():
        write_synced(partial / file, blob)
    write_synced(partial / MANIFEST, make_manifest(files, owner))
    sync_folder(partial)
    if os.path.lexists(final):  # one of this name that did not verify
        os.rename(final, refused)
    os.rename(partial, final)
    sync_folder(folder)
    reason = verify_checkpoint(final, owner)
    if reason is not None:
        raise StorageError(f"{final} was not stored as it was written, {reason}: check the disk; older ones are kept")
    discard(refused)
    retire_checkpoints(
        run, keep, lambda path: path == final or (path.name not in unfit and verify_checkpoint(path, owner) is None)
    )
    return final


def make_manifest(files: Mapping[str, Blob], owner: str = "") -> bytes:
    listed = {name: {"bytes": len(blob), "sha256": hashlib.sha256(blob).hexdigest()} for name, blob in files.items()}
    return _render({"schema": SCHEMA, "owner": owner, "files": listed})


def _render(manifest: Mapping[str, Any]) -> bytes:
    return (json.dumps(manifest, indent=2) + "\n").encode()


def retire_checkpoints(run: Path, keep: int, counts: Callable[[Path], bool]) -> None:
    """Remove all that are older than the newest ``keep`` that count; each vanishes whole, by a rename."""
    found, good = list_checkpoints(run), 0
    while found and good < max(keep, KEEP):
        good += counts(found.pop())
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


def refuse_other(folder: Path) -> None:
    """Where there is something instead of a folder, nothing may be taken for "no checkpoint yet"."""
    if folder.is_symlink():
        raise StorageError(f"{folder} is a symbolic link: move the checkpoints into their run folder")
    if os.path.lexists(folder) and not folder.is_dir():
        raise StorageError(f"{folder} is not a folder: move it away")


def list_checkpoints(run: Path) -> list[Path]:
    """Oldest first; usable or not."""
    folder = run / FOLDER
    refuse_other(folder)
    return sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name)) if folder.is_dir() else []


def read_manifest(path: Path, owner: str | None = None) -> dict[str, Any]:
    """Name -> {bytes, sha256} of exactly the expected files, or ``Unusable``; also if it is not ``owner``'s."""
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
        if type(manifest["owner"]) is not str or _render(manifest) != blob:
            raise Unusable("its manifest is not as it was written")
        if owner not in (None, manifest["owner"]):
            raise Unusable("it belongs to a run of other settings than config.json has")
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


def verify_checkpoint(path: Path, owner: str | None = None) -> str | None:
    """Why ``owner``, or anybody, cannot use this checkpoint, or None. Reads every byte, keeps none."""
    try:
        for name, expected in read_manifest(path, owner).items():
            try:
                size, digest = _hash_file(path / name, expected["bytes"])
            except OSError as error:
                raise Unusable(f"{name}: {_explain(error)}") from None
            _compare(name, size, digest, expected)
    except Unusable as reason:
        return str(reason)
    return None


def _hash_file(path: Path, expected: int) -> tuple[int, str]:
    """Size and checksum; a file that is not of the expected size is not read."""
    descriptor, size = open_regular(path, MAX_FILE)
    with os.fdopen(descriptor, "rb") as file:
        return size, hashlib.file_digest(file, "sha256").hexdigest() if size == expected else ""


def _compare(name: str, size: int, digest: str, expected: Mapping[str, Any]) -> None:
    if size != expected["bytes"]:
        raise Unusable(f"{name} has {size} bytes, the manifest says {expected['bytes']}")
    if digest != expected["sha256"]:
        raise Unusable(f"{name} does not match its checksum")


def _explain(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return str(error) if isinstance(error, OSError) else f"not valid ({type(error).__name__})"


def walk_back(
    run: Path, load: Callable[[Path], T], owner: str | None = None
) -> tuple[Path | None, T | None, dict[str, str]]:
    """The newest checkpoint that verifies and that ``load`` takes, what it gave, and why each newer one was skipped.

    A trainer may be at work: one that it has retired meanwhile is as if never listed, and so the list is made anew.
    """
    skipped: dict[str, str] = {}
    while left := [path for path in list_checkpoints(run) if path.name not in skipped]:
        reason = verify_checkpoint(left[-1], owner)
        if reason is None:
            try:
                return left[-1], load(left[-1]), skipped
            except Unusable as error:
                reason = str(error)
        if os.path.lexists(left[-1]):
            skipped[left[-1].name] = reason
    return None, None, skipped


def none_usable(run: Path, skipped: Mapping[str, str]) -> str:
    """Why a run has no checkpoint to take, and what helps."""
    for name, reason in skipped.items():
        why = f"the newest, {name}, because {reason}"
        return f"none of the {len(skipped)} checkpoints of {run} can be used, {why}: restore one, or config.json"
    return f"{run} has no checkpoint yet: train it with `bicovg train --resume {run}`"


def find_checkpoint(run: Path, owner: str | None = None) -> tuple[Path | None, dict[str, str]]:
    """The newest checkpoint that verifies, and why each newer one was skipped."""
    path, _, skipped = walk_back(run, lambda path: path, owner)
    return path, skipped
