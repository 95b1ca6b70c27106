"""Ways to break the save path on purpose, as edits of the source: the suite must notice each of them.

(label, file, what stands there, what the mutant has instead, the test that must fail, what it must complain of)
"""

POWER_LOSS = "tests/faults/test_save_path.py::test_a_power_loss_after_any_operation_leaves_the_last_saved_checkpoint"
FLIPS = "tests/test_checkpoint.py::test_every_flipped_bit_is_found"
UNVERIFIED = "tests/test_checkpoint.py::test_an_old_checkpoint_stays_until_the_new_one_verifies"

MUTANTS = [
    (
        "rename before the manifest's fsync",
        "bicovg/checkpoint.py",
        """    write_synced(partial / MANIFEST, make_manifest(files, owner))
    sync_folder(partial)
    if os.path.lexists(final):  # one of this name that did not verify
        os.rename(final, refused)
    os.rename(partial, final)
""",
        """    sync_folder(partial)
    if os.path.lexists(final):  # one of this name that did not verify
        os.rename(final, refused)
    os.rename(partial, final)
    write_synced(final / MANIFEST, make_manifest(files, owner))
""",
        POWER_LOSS,
        "is torn",
    ),
    (
        "skip the checksum",
        "bicovg/checkpoint.py",
        """    if digest != expected["sha256"]:
""",
        """    if not digest:
""",
        FLIPS,
        "of model.safetensors",
    ),
    (
        "delete the old before the new verifies",
        "bicovg/checkpoint.py",
        """    os.rename(partial, final)
    sync_folder(folder)
    reason = verify_checkpoint(final, owner)
""",
        """    for path in list_checkpoints(run)[: 1 - keep]:
        os.rename(path, folder / f".trash-{path.name}")
        sync_folder(folder)
        discard(folder / f".trash-{path.name}")
    os.rename(partial, final)
    sync_folder(folder)
    reason = verify_checkpoint(final, owner)
""",
        POWER_LOSS,
        "are left of",
    ),
    (
        "delete the old although the new does not verify",
        "bicovg/checkpoint.py",
        """    reason = verify_checkpoint(final, owner)
    if reason is not None:
        raise""",
        """    reason = verify_checkpoint(final, owner)
    for path in list_checkpoints(run)[: 1 - keep]:
        discard(path)
    if reason is not None:
        raise""",
        UNVERIFIED,
        "assert found is not None",
    ),
    (
        "no fsync of the files",
        "bicovg/durable.py",
        """            left = left[os.write(descriptor, left) :]
        os.fsync(descriptor)
""",
        """            left = left[os.write(descriptor, left) :]
""",
        POWER_LOSS,
        "is torn",
    ),
    (
        "no fsync of the parent after the rename",
        "bicovg/checkpoint.py",
        """    os.rename(partial, final)
    sync_folder(folder)
""",
        """    os.rename(partial, final)
""",
        POWER_LOSS,
        "had returned, the newest is",
    ),
]
