"""Real processes, cheaply: a parent that has imported torch and trained once, from which every trial is forked.

Run as a script it is that parent: it reads one JSON request per line (fork a command, wait for it) and answers. A
trial is ``bicovg`` with given words, in a process of its own, after an optional plant (see plants.py) was put in.
"""

import gc
import json
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
HANG = 60.0  # seconds after which a trial counts as hung


@dataclass
class Trial:
    """A forked command. ``code`` is its exit code, or minus the signal that ended it."""

    pid: int
    log: Path
    code: int | None = None

    def send(self, number):
        os.kill(self.pid, number)

    def interrupt(self, number, delay):
        """Send a signal after ``delay`` seconds; the seconds it ran if it ended before that, else None."""
        begun = time.monotonic()
        while (elapsed := time.monotonic() - begun) < delay:
            if Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return elapsed
            time.sleep(min(0.005, delay - elapsed))
        self.send(number)
        return None

    @property
    def output(self):
        return self.log.read_text(errors="replace")


class Nursery:
    """The client's side: forks trials and collects them."""

    def __init__(self, logs):
        self.logs, self.count = Path(logs), 0
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": f"{HERE.parents[1]}:{HERE.parent}",
            "GIT_DIR": os.devnull,
        }
        with open(self.logs / "nursery.log", "w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-W", "error", str(HERE / "nursery.py"), str(logs)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment,
                cwd=logs,
            )
        if self._ask({"do": "hello"}, timeout=300) != {"ready": True}:
            self.close()
            raise AssertionError((self.logs / "nursery.log").read_text()[-3000:])

    def _ask(self, request, timeout=HANG):
        self.process.stdin.write(json.dumps(request).encode() + b"\n")
        self.process.stdin.flush()
        ready, _, _ = select.select([self.process.stdout], [], [], timeout)
        line = self.process.stdout.readline() if ready else b""
        return json.loads(line) if line else None

    def fork(self, words, plant=None, user=None, **arguments):
        """Start ``bicovg WORDS``; ``plant`` names a function of plants.py, ``user`` an id to become first."""
        self.count += 1
        log = self.logs / f"trial-{self.count % 100}.log"
        plants = None if plant is None else [plant, arguments]
        words = [str(word) for word in words]
        answer = self._ask({"do": "fork", "words": words, "plant": plants, "user": user, "log": str(log)})
        return Trial(answer["pid"], log)

    def wait(self, trial):
        """The trial's exit code; a hang is killed and fails."""
        answer = self._ask({"do": "wait", "pid": trial.pid})
        if answer is None:
            trial.send(signal.SIGKILL)
            self.process.stdout.readline()
            raise AssertionError(f"hung for {HANG:g} s:\n{trial.output[-2000:]}")
        trial.code = answer["code"]
        return trial.code

    def run(self, words, plant=None, user=None, **arguments):
        """Fork and wait."""
        trial = self.fork(words, plant, user, **arguments)
        self.wait(trial)
        return trial

    def close(self):
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait(30)
        self.process.stdout.close()


def become_trial(request, begun):
    """In the forked child: own session, own log, then the command; never returns. ``begun`` is told when."""
    os.setsid()
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, source in ((0, nothing), (1, log), (2, log)):
        os.dup2(source, number)
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115
    code = 70
    try:
        import plants

        from bicovg.cli import main

        if request["plant"] is not None:
            name, arguments = request["plant"]
            getattr(plants, name)(**arguments)
        if request["user"] is not None:
            os.setgroups([])
            os.setgid(request["user"])
            os.setuid(request["user"])
        os.write(begun, b"!")
        os.close(begun)
        code = main(request["words"])
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def warm_up(folder):
    """Train once here, so that a fork starts with everything imported and every lazy set-up done."""
    import io
    from contextlib import redirect_stdout

    import torch
    from settings import TINY

    from bicovg.cli import main

    torch.set_num_threads(1)
    with redirect_stdout(io.StringIO()):
        assert main([*TINY, "--train.epochs", "2", "--out", f"{folder}/warm-up-{os.getpid()}"]) == 0


def serve(folder):
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    warm_up(folder)
    gc.collect()
    gc.freeze()  # a forked trial's collector need not touch, and so copy, what was made here
    for line in sys.stdin:
        request = json.loads(line)
        answer = {"ready": True}
        if request["do"] == "fork":
            listening, begun = os.pipe()
            pid = os.fork()
            if pid == 0:
                become_trial(request, begun)
            os.close(begun)
            os.read(listening, 1)
            os.close(listening)
            answer = {"pid": pid}
        elif request["do"] == "wait":
            _, status = os.waitpid(request["pid"], 0)
            answer = {"code": os.waitstatus_to_exitcode(status)}
        answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    serve(sys.argv[1])
    os._exit(0)  # native libraries print to a closed terminal on their way out
