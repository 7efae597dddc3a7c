"""Processes for the tests that need not import anything: each is forked from one that has imported it all."""

import atexit
import gc
import importlib
import multiprocessing
import os
import runpy
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO

from vla_ros.cli.main import main

_FORKS = multiprocessing.get_context("forkserver")
_NODES = ["vla_ros.node.run", "vla_ros.graph.dds", "rosbags.typesys.stores.ros2_jazzy", "pinocchio"]
_USERS = {
    "torch": ["vla_ros_models.oft.policy", "vla_ros_models.pi.policy", "vla_ros_lab.eval.demo"],
    "uvicorn": ["vla_ros.console.cli", "vla_ros.console.server"],
}
"""What is imported, too, where the library is, which this process has imported already."""
TRAINING = ("accelerate", "peft", "vla_ros_lab.training.command")
_wanted: list[str] = []


def preload(*modules: str) -> None:
    """Import ``modules``, too, before the first process is forked; no effect afterwards."""
    _wanted.extend(modules)
    users = [one for library, modules in _USERS.items() if library in sys.modules for one in modules]
    _FORKS.set_forkserver_preload([*_NODES, *users, *_wanted])


def vla_ros(words: Sequence[str]) -> int:
    """Do what the command ``vla-ros`` does."""
    sys.argv = ["vla-ros", *words]
    return main()


def script(words: Sequence[str]) -> None:
    """Run a file of Python with its arguments."""
    sys.argv = list(words)
    runpy.run_path(words[0], run_name="__main__")


def shell(words: Sequence[str]) -> None:
    """Become a shell that executes a command."""
    os.execvp("bash", ["bash", "-euo", "pipefail", "-c", *words])


def module(words: Sequence[str]) -> int | None:
    """Do what ``python -m`` does with a module whose ``main`` takes the arguments of the command line."""
    sys.argv = list(words)
    found: int | None = importlib.import_module(words[0]).main()
    return found


class Fork:
    """``main(words)`` in a process of its own: what the tests use of Popen.

    Args:
        main: Found by its name, in a module that can be imported.
        words: Its arguments; the exit status is what it returns.
        output: File for what the process prints, or a descriptor. ``None``: the pipe ``stdout``;
            its standard input, which is empty otherwise, is the pipe ``stdin`` then.
        errors: The same for standard error; ``None``: ``output``.
        environment: All variables; ``None``: those of this process.
        folder: Its current folder; ``None``: that of this process.
    """

    stdin: IO[str] | None = None
    stdout: IO[str] | None = None

    def __init__(
        self,
        main: Callable[[Sequence[str]], int | None],
        words: Sequence[str],
        output: Path | int | None,
        errors: Path | int | None = None,
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
    ) -> None:
        preload()
        variables = dict(os.environ if environment is None else environment)
        with ExitStack() as opened:

            def descriptor(file: Path | int, mode: str = "w") -> int:
                return file if isinstance(file, int) else opened.enter_context(file.open(mode)).fileno()

            if output is None:
                (source, written), (read, output) = os.pipe(), os.pipe()
                self.stdin, self.stdout = os.fdopen(written, "w", 1), os.fdopen(read)
                for end in (source, output):
                    opened.callback(os.close, end)
            else:
                source, output = descriptor(Path(os.devnull), "r"), descriptor(output)
            three = (source, output, output if errors is None else descriptor(errors))
            standard = [Connection(os.dup(one)) for one in three]
            arguments = (main, list(words), variables, folder or Path.cwd(), standard)
            self._process = _FORKS.Process(target=_become, args=arguments)
            self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """Return the exit status, if the process has ended."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status, within ``timeout`` seconds."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the process."""
        self._process.kill()


def _become(
    main: Callable[[Sequence[str]], int | None],
    words: Sequence[str],
    environment: Mapping[str, str],
    folder: Path,
    standard: Sequence[Connection],
) -> None:
    gc.freeze()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    for number, copy in enumerate(standard):
        os.dup2(copy.fileno(), number)
        copy.close()
    sys.stdin, sys.orig_argv = os.fdopen(0, closefd=False), [sys.executable, *words]
    paths = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = added = [path for path in paths if path and path not in sys.path]
    for file in (Path(path, "sitecustomize.py") for path in added):
        if file.is_file():  # as Python does when it starts
            runpy.run_path(str(file))
    try:
        sys.exit(main(words))
    finally:
        atexit._run_exitfuncs()
