"""Who is missing when an exchange has failed, and why.

The one that notices raises an alarm in the store; a thread in every living process hears it and signs, whatever the
process itself waits for: in a long chain most wait for another survivor, not for the one that died. Who has not signed
after a while is lost; if all have, it is those that had not come to the exchange. The first verdict stands for all, and
the threads fetch it, because the store may end with rank 0. A process that leaves for a reason of its own says it.
"""

import threading
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

SILENCE = 4.0  # seconds in which a living rank signs
LISTENING = 0.5  # seconds between two looks at the store
ALARM, VERDICT = "bicovg/alarm", "bicovg/verdict"
WAITING, BUSY = "waiting", "busy"
NO_STORE = "rank 0's machine was lost (its key-value store does not answer)"


class Survivors:
    """The list in the store, and this process's thread that signs it.

    Attributes:
        exchanges: how many this process is inside of.
    """

    def __init__(self, store: Any, rank: int, world: int) -> None:
        self.store, self.rank, self.world = store, rank, world
        self.exchanges = 0
        self._verdict: str | None = None
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="bicovg-survivor", daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        """Sign once the alarm is raised, then fetch the verdict."""
        signed = False
        with suppress(RuntimeError):  # the store is gone
            while not self._left.wait(LISTENING):
                if not signed and self.store.check([ALARM]):
                    self._sign(WAITING if self.exchanges else BUSY)
                    signed = True
                if signed and self.store.check([VERDICT]):
                    self._verdict = str(self.store.get(VERDICT).decode())
                    return

    def _sign(self, state: str) -> None:
        self.store.set(f"bicovg/survivor/{self.rank}", state)

    def leave(self) -> None:
        """End the thread."""
        self._left.set()
        self._thread.join(SILENCE)

    def say_farewell(self, reason: str) -> None:
        """Before this process leaves the others alone: the verdict, before anybody asks for one."""
        with suppress(RuntimeError):
            if not self.store.check([VERDICT]):
                self.store.set(VERDICT, f"rank {self.rank} has left ({reason})")
                self.store.set(ALARM, "")
        self._linger()

    def _linger(self) -> None:
        """The store may end with rank 0: let the others read the verdict first."""
        if self.rank == 0:
            time.sleep(2 * LISTENING)

    def name_lost(self) -> str:
        """One clause that names who is missing. It takes no longer than a store that has fallen silent may."""
        found: list[str] = []
        judge = threading.Thread(target=lambda: found.append(self._judge()), daemon=True)
        judge.start()
        judge.join(3 * SILENCE)
        self._linger()
        return found[0] if found else self._verdict or NO_STORE

    def _judge(self) -> str:
        with suppress(RuntimeError):
            self.store.set_timeout(timedelta(seconds=SILENCE))
            if self._verdict is None and not self.store.check([VERDICT]):
                self.store.set(ALARM, "")
                self._sign(WAITING)
                self.store.set(VERDICT, describe(*self._wait_for_all()))
            return self._verdict or str(self.store.get(VERDICT).decode())
        return self._verdict or NO_STORE

    def _wait_for_all(self) -> tuple[list[int], list[int]]:
        """The ranks that have not signed in time, and those that signed and were not in an exchange."""
        missing, busy, end = list(range(self.world)), list[int](), time.monotonic() + SILENCE
        while missing and time.monotonic() < end:
            for rank in [rank for rank in missing if self.store.check([f"bicovg/survivor/{rank}"])]:
                missing.remove(rank)
                if self.store.get(f"bicovg/survivor/{rank}").decode() == BUSY:
                    busy.append(rank)
            time.sleep(0.1)
        return missing, busy


def describe(missing: list[int], busy: list[int]) -> str:
    if missing:
        return f"{name_ranks(missing)} lost (dead, or without an answer)"
    if busy:
        return f"{name_ranks(busy)} missing (alive, but not at the exchange)"
    return "an exchange failed with every rank alive"


def name_ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]} was" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} were"
