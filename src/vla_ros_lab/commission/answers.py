"""The person at the terminal, who confirms what the arm does."""

import queue
import sys
import threading
from collections.abc import Generator


class Person:
    """Whoever answers at the terminal; with ``yes``, every answer is yes and nobody presses anything."""

    def __init__(self, *, yes: bool) -> None:
        self._yes, self._lines = yes, queue.SimpleQueue[str]()
        if not yes:
            threading.Thread(target=self._read, name="answers", daemon=True).start()

    def _read(self) -> None:
        for line in sys.stdin:
            self._lines.put(line.strip().lower())
        self._lines.put("n")  # the terminal is gone

    def pressed(self) -> bool:
        return not self._lines.empty()

    def ask(self, question: str) -> Generator[None, None, bool]:
        while self.pressed():  # what was typed before is no answer
            self._lines.get()
        print(f"{question} [y/n] ", end="y\n" if self._yes else "", flush=True)
        while not self._yes:
            if self.pressed():
                return self._lines.get() in ("y", "yes")
            yield
        return True
