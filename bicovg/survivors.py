"""Who is still there when an exchange has failed.

The one that notices raises an alarm in the store; a thread in every living process hears it and signs, whatever the
process itself waits for: in a long chain most wait for another survivor, not for the one that died. Who has not signed
after a while is lost. Who notices later, because a survivor has left, reads what the first has found.
"""

import threading
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

SILENCE = 4.0  # seconds in which a living rank signs
LISTENING = 0.5  # seconds between two looks at the alarm
ALARM, VERDICT = "bicovg/alarm", "bicovg/verdict"


class Survivors:
    """The list in the store, and this process's thread that signs it."""

    def __init__(self, store: Any, rank: int, world: int) -> None:
        self.store, self.rank, self.world = store, rank, world
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="bicovg-survivor", daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        with suppress(RuntimeError):  # the store is gone, and with it the run
            while not self._left.wait(LISTENING):
                if self.store.check([ALARM]):
                    self._sign()
                    return

    def _sign(self) -> None:
        self.store.set(f"bicovg/survivor/{self.rank}", "here")

    def leave(self) -> None:
        """End the thread."""
        self._left.set()
        self._thread.join(SILENCE)

    def name_lost(self) -> str:
        """One clause that names who is missing."""
        with suppress(RuntimeError):
            self.store.set_timeout(timedelta(seconds=SILENCE))
            if not self.store.check([VERDICT]):
                self.store.set(ALARM, "")
                self._sign()
                self.store.set(VERDICT, describe_lost(self._wait_for_all()))
            return str(self.store.get(VERDICT).decode())
        return "rank 0's machine was lost (its key-value store does not answer)"

    def _wait_for_all(self) -> list[int]:
        """The ranks that have not signed in time."""
        missing, end = list(range(self.world)), time.monotonic() + SILENCE
        while missing and time.monotonic() < end:
            missing = [rank for rank in missing if not self.store.check([f"bicovg/survivor/{rank}"])]
            time.sleep(0.1)
        return missing


def describe_lost(ranks: list[int]) -> str:
    if not ranks:
        return "an exchange failed with every rank alive"
    if len(ranks) == 1:
        return f"rank {ranks[0]} was lost (it died or does not answer)"
    return f"ranks {', '.join(map(str, ranks))} were lost"
