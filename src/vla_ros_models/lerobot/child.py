"""LeRobot in a separate environment, as a child process of the node."""

from pathlib import Path

from vla_ros.config import Config
from vla_ros.contract.spec import PolicySpec
from vla_ros.errors import ConfigError
from vla_ros.policies.base import Progress, no_progress, options_of
from vla_ros.policies.remote import RemoteOptions
from vla_ros.policies.remote.child import ServerProcess
from vla_ros.policies.remote.policy import RemotePolicy
from vla_ros_models.lerobot.checkpoint import read_spec
from vla_ros_models.lerobot.options import LeRobotOptions


class LeRobotChild(RemotePolicy):
    """Serves the checkpoint with ``policy.python`` in a child process, and connects to it."""

    Options = LeRobotOptions

    def __init__(self, config: Config) -> None:
        self._own = options_of(config, LeRobotOptions)
        self._folder = Path(self._own.checkpoint).expanduser()
        self._server: ServerProcess | None = None
        self._use(config, RemoteOptions(name="remote", server="ws://127.0.0.1"))

    def describe(self) -> PolicySpec:
        return read_spec(self._folder)

    def load(self, progress: Progress = no_progress) -> None:
        """Start the process, and connect to it once its policy is loaded."""
        self.describe()  # reports a wrong checkpoint at once
        python = Path(self._own.python).expanduser()
        if not python.exists():
            raise ConfigError(
                f"policy.python: '{python}' does not exist; expected the Python of an environment that has LeRobot "
                "and this package: in the repository's folder, PYTHON -m pip install '.[serve,lerobot]'"
            )
        arguments = ["--policy", "lerobot", "--checkpoint", str(self._folder)]
        for name in ("device", "tokenizer", "seed"):
            if (value := getattr(self._own, name)) != "":
                arguments += ["-p", f"policy.{name}:={value}"]
        progress(0.0, f"starting {python}")
        self._server = ServerProcess(python, arguments)
        try:
            self._server.start()
            self._use(self._config, RemoteOptions("remote", server=self._server.url), self._server.key)
            super().load(progress)
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Process id of the server; 0 if it is not running."""
        return self._server.pid if self._server else 0

    def close(self) -> None:
        super().close()
        server, self._server = self._server, None
        if server is not None:
            server.close()
