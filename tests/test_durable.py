"""Files that survive a crash, and reads that cannot be led astray."""

import errno
import os

import pytest

from bicovg.durable import append_line, read_regular, replace_file


def test_a_line_is_added_whole_or_not_at_all(tmp_path, monkeypatch):
    path, plain, room = tmp_path / "metrics.jsonl", os.write, [9]
    append_line(path, '{"epoch": 0}')

    def write_some(descriptor, blob):
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        done = plain(descriptor, bytes(blob[: room[0]]))
        room[0] -= done
        return done

    monkeypatch.setattr(os, "write", write_some)
    with pytest.raises(OSError, match="No space left"):
        append_line(path, '{"epoch": 1}')
    assert path.read_text() == '{"epoch": 0}\n'
    room[0] = 9
    monkeypatch.setattr(os, "write", lambda descriptor, blob: plain(descriptor, bytes(blob[:5])))
    append_line(path, '{"epoch": 1}')
    assert path.read_text() == '{"epoch": 0}\n{"epoch": 1}\n'


def test_a_replaced_file_is_the_old_or_the_new_and_no_link_is_written_through(tmp_path):
    path, outside = tmp_path / "file", tmp_path / "outside"
    outside.write_text("mine")
    replace_file(path, b"one")
    (tmp_path / ".file.tmp").symlink_to(outside)
    replace_file(path, b"two")
    assert path.read_bytes() == b"two"
    path.unlink()
    path.symlink_to(outside)
    replace_file(path, b"three")
    assert not path.is_symlink()
    linked = tmp_path / "lines"
    linked.symlink_to(outside)
    with pytest.raises(OSError, match="symbolic links"):
        append_line(linked, "yours")
    assert outside.read_text() == "mine"


def test_only_plain_files_of_a_bounded_size_are_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_bytes(b"0123456789")
    for name, message in (("pipe", "not a plain file"), ("large", "10 bytes, more than the 9"), ("none", "No such")):
        with pytest.raises(OSError, match=message):
            read_regular(tmp_path / name, 9)
    assert read_regular(tmp_path / "large", 10) == b"0123456789"
