"""Prints without waiting: a log that nobody reads must not keep the guard from its work."""

import os
import select
import subprocess


class Printing:
    """Standard output and error of this process, through a pipe and a copier of its own.

    What does not fit into the pipe is lost. The copier is no thread, which could keep the interpreter, and ends
    when this process does.
    """

    def __init__(self) -> None:
        read, write = os.pipe()
        os.set_blocking(write, False)
        # A session of its own: Ctrl-C must not end it before the last line.
        self._copier = subprocess.Popen(["cat"], stdin=read, stdout=2, start_new_session=True)
        os.dup2(write, 1)
        os.dup2(write, 2)
        os.close(read)
        os.close(write)

    @property
    def has_room(self) -> bool:
        """False while a line could get lost."""
        return bool(select.select([], [2], [], 0)[1])
