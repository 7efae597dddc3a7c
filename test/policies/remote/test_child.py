import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("websockets")
pytest.importorskip("msgpack")

import vla_ros
from test.serve.serving import until
from vla_ros.config import Config
from vla_ros.errors import ServerLostError
from vla_ros.policies.remote import RemoteOptions
from vla_ros.policies.remote.child import ServerProcess
from vla_ros.policies.remote.policy import RemotePolicy
from vla_ros.types import ActionChunk, Observation

LOOK = Observation({"image": np.zeros((8, 8, 3), np.uint8)}, "wait", 7)


@pytest.fixture
def server() -> Iterator[ServerProcess]:
    child = ServerProcess(Path(sys.executable), ["--policy", "hold"])
    yield child
    child.close()


def client(server: ServerProcess, key_file: str = "") -> RemotePolicy:
    options = RemoteOptions(name="remote", server=server.url, api_key_file=key_file, connect_timeout=5.0)
    return RemotePolicy(Config(policy=options))


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return "State:\tZ" in Path(f"/proc/{pid}/status").read_text()


def test_a_killed_server_is_restarted_at_its_address(server: ServerProcess, monkeypatch, tmp_path) -> None:
    monkeypatch.delenv("VLA_ROS_API_KEY", raising=False)
    server.start()
    with pytest.raises(Exception, match="key"):
        client(server).load()
    (tmp_path / "key").write_text(server.key)
    policy = client(server, str(tmp_path / "key"))
    policy.load()
    session = policy.start_session()
    assert policy.infer(session, LOOK).stamp == 7
    first, address = server.pid, server.url
    os.kill(first, signal.SIGKILL)

    def answered() -> bool:
        try:
            return isinstance(policy.infer(session, LOOK), ActionChunk)
        except ServerLostError:
            return False

    until(lambda: server.pid != first and answered())
    assert server.url == address
    session.close()
    last = server.pid
    server.close()
    assert gone(last)


PARENT = """
import sys, time
from pathlib import Path
from vla_ros.policies.remote.child import ServerProcess
child = ServerProcess(Path(sys.executable), ["--policy", "hold"])
child.start()
print(child.pid, flush=True)
time.sleep(600)
"""


def test_the_server_ends_with_a_parent_that_is_killed_and_leaves_no_file(tmp_path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True, env=environment)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert not gone(pid)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    until(lambda: gone(pid))
    assert list(tmp_path.iterdir()) == []


def test_the_server_does_not_get_the_libraries_of_this_python(server: ServerProcess, tmp_path, monkeypatch) -> None:
    (tmp_path / "numpy.py").write_text("raise ImportError('numpy of another Python')\n")
    own = str(Path(vla_ros.__file__).parents[1])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), "", own]))
    server.start()
    assert f"PYTHONPATH={own}" in Path(f"/proc/{server.pid}/environ").read_text().split("\0")
    assert server.key not in Path(f"/proc/{server.pid}/cmdline").read_text()


def test_the_output_of_a_server_that_does_not_start_is_quoted(tmp_path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho No module named vla_ros\nexit 3\n")
    python.chmod(0o755)
    quoted = "before it served; its output: No module named vla_ros"
    for path, said in ((python, quoted), (tmp_path / "none", "cannot be started")):
        child = ServerProcess(path, [])
        with pytest.raises(ServerLostError, match=said):
            child.start()
        child.close()
