"""The second example of docs/python.md: a chunk of a server, in ten lines."""

import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from test.command import VLA_ROS

PAGE = Path(__file__).parents[2] / "docs/python.md"


def test_a_server_is_asked_as_the_page_says(tmp_path: Path) -> None:
    pytest.importorskip("websockets", reason="websockets is not installed (extra 'serve')")
    pytest.importorskip("torch", reason="torch is not installed (extra 'openvla')")
    examples = re.findall(r"^```python\n(.*?)^```", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    asking = next(text for text in examples if "remote" in text)
    assert sum(bool(line) and not line.startswith(("import", "from")) for line in asking.splitlines()) <= 10
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    options = ["-p", "policy.unnorm_key:=table_10hz", "--port", port]
    log = tmp_path / "serve.log"
    with log.open("wb") as output:
        server = subprocess.Popen(
            [*VLA_ROS, "serve", "--checkpoint", "demo", *options], stderr=output, stdout=output
        )
    try:
        deadline = time.monotonic() + 100
        while "serving" not in (said := log.read_text()):
            assert server.poll() is None, said
            assert time.monotonic() < deadline, said
            time.sleep(0.05)
        program = asking.replace("8000", port)
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False
        )
        assert done.returncode == 0, done.stderr
        assert len(re.findall(r"-?\d\.\d+(?:e-?\d+)?|-?\d\.", done.stdout)) == 7, done.stdout
    finally:
        server.terminate()
        server.wait(30)
