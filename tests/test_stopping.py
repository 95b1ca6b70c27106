"""Signals and time limits ask a run to stop; a lock keeps two out of one folder."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from bicovg.errors import StorageError, UserError
from bicovg.stopping import RunLock, Stopper, StopRequested


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGINT", 130), ("SIGUSR1", 138)])
def test_a_signal_sets_the_flag_and_nothing_else(name, code):
    with Stopper() as stopper:
        stopper.check()
        os.kill(os.getpid(), getattr(signal, name))
        with pytest.raises(StopRequested):
            stopper.check_signals()
    assert (stopper.reason, stopper.exit_code) == (name, code)


def test_the_first_signal_decides_the_exit_code():
    with Stopper() as stopper:
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)
    assert stopper.exit_code == 138


def test_a_second_interrupt_ends_at_once_whatever_other_threads_do():
    code = (
        "import os, signal, threading, time, bicovg.stopping as s\n"
        "with s.Stopper() as stopper:\n"
        "    threading.Thread(target=time.sleep, args=(60,)).start()\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    print(stopper.exit_code, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    time.sleep(60)\n"
    )
    begun = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "130\n", "bicovg: interrupted\n")
    deaf = "import os; os.close(2)\n" + code  # whoever listened has gone first
    assert subprocess.run([sys.executable, "-c", deaf], stdout=subprocess.DEVNULL).returncode == 130
    assert time.monotonic() - begun < 30


def test_handlers_are_put_back():
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)]
    with Stopper():
        os.kill(os.getpid(), signal.SIGINT)
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)] == before


def test_a_time_limit_counts_at_step_boundaries_only():
    stopper = Stopper(max_seconds=0.01)
    time.sleep(0.02)
    stopper.check_signals()
    with pytest.raises(StopRequested):
        stopper.check()
    assert (stopper.reason, stopper.exit_code) == ("the limit of 0.01 s", 0)


def test_in_another_thread_a_stopper_leaves_the_handlers_alone():
    before = signal.getsignal(signal.SIGTERM)
    found = []

    def enter():
        with Stopper():
            found.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert found == [before]


def test_a_second_lock_is_refused_and_names_the_holder(tmp_path):
    lock = RunLock(tmp_path)
    with pytest.raises(UserError, match=rf"is in use by process {os.getpid()} on .*: wait until it has ended"):
        RunLock(tmp_path)
    lock.release()
    RunLock(tmp_path).release()


def test_a_killed_process_leaves_no_lock_behind(tmp_path):
    code = "import sys, pathlib, bicovg.stopping as s; s.RunLock(pathlib.Path(sys.argv[1])); print('!', flush=True); "
    command = [sys.executable, "-c", code + "sys.stdin.read()", str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"!\n"
        with pytest.raises(UserError, match=f"process {holder.pid}"):
            RunLock(tmp_path)
        holder.kill()
    RunLock(tmp_path).release()


def test_a_lock_that_cannot_be_written_is_a_storage_error(tmp_path):
    with pytest.raises(StorageError, match="No such file"):
        RunLock(tmp_path / "missing")
    (tmp_path / "lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StorageError, match="make the run folder writable"):
        RunLock(tmp_path)
    assert not (tmp_path / "elsewhere").exists()
