"""LeRobot in a separate environment, as a child process of the node."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from vla_ros.config import Config
from vla_ros.contract.spec import PolicySpec
from vla_ros.errors import ConfigError
from vla_ros.policies.base import Policy, Progress, no_progress, options_of
from vla_ros.policies.lerobot.checkpoint import read_spec
from vla_ros.policies.lerobot.options import LeRobotOptions
from vla_ros.policies.remote.child import ServerProcess
from vla_ros.policies.remote.options import RemoteOptions
from vla_ros.policies.remote.policy import RemotePolicy, RemoteSession
from vla_ros.types import ActionChunk, Observation


class LeRobotChild(Policy):
    """Starts ``policy.python`` with the checkpoint, connects to it over loopback, and stops it."""

    Options = LeRobotOptions

    def __init__(self, config: Config) -> None:
        self._config, self._options = config, options_of(config, LeRobotOptions)
        self._server: ServerProcess | None = None
        self._remote: RemotePolicy | None = None

    def describe(self) -> PolicySpec:
        """Return inputs and outputs from the checkpoint's ``config.json``."""
        return read_spec(Path(self._options.checkpoint).expanduser())

    def load(self, progress: Progress = no_progress) -> None:
        """Start the process, and connect when its policy is loaded."""
        self.describe()  # names a wrong checkpoint at once
        python = Path(self._options.python).expanduser()
        if not python.exists():
            raise ConfigError(
                f"policy.python: '{python}' does not exist; expected the Python of an environment that has LeRobot "
                "and this package: pip install 'vla_ros[serve]' lerobot"
            )
        options = {
            name: getattr(self._options, name)
            for name in ("device", "tokenizer", "seed")
            if getattr(self._options, name) != ""
        }
        arguments = ["--policy", "lerobot", "--checkpoint", str(Path(self._options.checkpoint).expanduser())]
        arguments += [part for name, value in options.items() for part in ("-p", f"policy.{name}:={value}")]
        progress(0.0, f"starting {python}")
        self._server = ServerProcess(python, arguments)
        try:
            self._server.start()
            remote = RemoteOptions(
                name="remote",
                instruction=self._options.instruction,
                server=self._server.url,
                api_key_file=str(self._server.key_file),
            )
            self._remote = RemotePolicy(replace(self._config, policy=remote))
            self._remote.load(progress)
        except BaseException:
            self.close()
            raise
        self.spec = self._remote.spec

    @property
    def pid(self) -> int:
        """Id of LeRobot's process; 0 before :meth:`load`."""
        return self._server.pid if self._server else 0

    def start_session(self) -> RemoteSession:
        """Connect a robot."""
        assert self._remote is not None
        return self._remote.start_session()

    def infer(self, session: RemoteSession, observation: Observation) -> ActionChunk:
        """Run the inference in the child process; if it died, this is ``server_lost`` until it runs again."""
        assert self._remote is not None
        return self._remote.infer(session, observation)

    def close(self) -> None:
        """End the process."""
        remote, self._remote = self._remote, None
        if remote is not None:
            remote.close()
        server, self._server = self._server, None
        if server is not None:
            server.close()
