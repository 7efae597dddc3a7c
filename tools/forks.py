"""Processes for the tests that need not import anything: each is forked from one that has imported it all."""

import atexit
import multiprocessing
import os
import runpy
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

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


class Fork:
    """``main(words)`` in a process of its own: what the tests use of Popen.

    Args:
        main: Found by its name, in a module that can be imported.
        words: Its arguments; the exit status is what it returns.
        output: File to which the process appends what it prints.
        errors: The same for standard error; ``None``: ``output``.
        environment: All variables; ``None``: those of this process.
    """

    def __init__(
        self,
        main: Callable[[Sequence[str]], int | None],
        words: Sequence[str],
        output: Path,
        errors: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        for file in (output, errors or output):
            file.write_text("")
        preload()
        variables = dict(os.environ if environment is None else environment)
        arguments = (main, list(words), variables, Path.cwd(), output, errors or output)
        self._process = _FORKS.Process(target=_become, args=arguments)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """Return the exit status, if the process has ended."""
        return self._process.exitcode

    def wait(self, timeout: float) -> int:
        """Return the exit status, within ``timeout`` seconds."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a forked process", timeout)
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
    output: Path,
    errors: Path,
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    paths = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [path for path in paths if path and path not in sys.path]
    for standard, path in ((0, Path(os.devnull)), (1, output), (2, errors)):
        with path.open("r" if standard == 0 else "a") as file:
            os.dup2(file.fileno(), standard)
    try:
        sys.exit(main(words))
    finally:
        atexit._run_exitfuncs()
