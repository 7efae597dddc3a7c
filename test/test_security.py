import ast
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "vla_ros"
FORBIDDEN_IMPORTS = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
FORBIDDEN_CALLS = {"eval", "exec", "compile"}
LOOPBACK = "0100007F"


def sources() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def name_of(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{name_of(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def complaints(tree: ast.AST) -> Iterator[str]:
    """Code in a module that could execute its input."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            modules = [alias.name for alias in node.names]
            if isinstance(node, ast.ImportFrom) and modules != ["UnpicklingError"]:  # which reads nothing
                modules += [node.module or ""]
            for module in modules:
                if module.split(".")[0] in FORBIDDEN_IMPORTS:
                    yield f"{node.lineno}: imports {module}"
        if not isinstance(node, ast.Call):
            continue
        called, given = name_of(node.func), {word.arg: word.value for word in node.keywords}
        if called in FORBIDDEN_CALLS:
            yield f"{node.lineno}: calls {called}"
        if called in ("torch.load", "numpy.load", "np.load", "yaml.load", "yaml.unsafe_load", "yaml.full_load"):
            safe = given.get("weights_only" if called == "torch.load" else "allow_pickle")
            wanted = called == "torch.load"
            if called.startswith("yaml.") or not isinstance(safe, ast.Constant) or safe.value is not wanted:
                yield f"{node.lineno}: calls {called} without a safe loader"
        code = given.get("trust_remote_code")
        if code is not None and not (isinstance(code, ast.Constant) and code.value is False):
            yield f"{node.lineno}: trusts remote code"
        shell = given.get("shell")
        if shell is not None and not (isinstance(shell, ast.Constant) and shell.value is False):
            yield f"{node.lineno}: gives a text to a shell"


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from joblib import load",
        "from pickle import UnpicklingError, loads",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path, allow_pickle=True)",
        "yaml.load(text, yaml.Loader)",
        "AutoModel.from_pretrained(path, trust_remote_code=True)",
        "eval(text)",
        "subprocess.run(text, shell=True)",
    ],
)
def test_the_search_finds_unsafe_code(text: str) -> None:
    assert list(complaints(ast.parse(text)))


def test_no_module_executes_its_input() -> None:
    found = [
        f"{path.relative_to(SOURCE)}:{complaint}"
        for path in sources()
        for complaint in complaints(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert found == []
    assert len(sources()) > 80


def sockets(pid: int) -> tuple[set[str], set[str]]:
    """Local addresses, as the kernel writes them: of TCP sockets that listen, and of all UDP sockets."""
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = str(link.readlink())
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    found: dict[str, set[str]] = {}
    for kind in ("tcp", "tcp6", "udp", "udp6"):
        table = Path(f"/proc/{pid}/net/{kind}")
        rows = [line.split() for line in table.read_text().splitlines()[1:]] if table.exists() else []
        own = [row for row in rows if row[9] in inodes]
        found[kind] = {row[1] for row in own if not kind.startswith("tcp") or row[3] == "0A"}
    return found["tcp"] | found["tcp6"], found["udp"] | found["udp6"]


@pytest.mark.parametrize("port", [0, 29_471])
def test_the_node_listens_only_on_loopback_and_configured_tcp_ports(tmp_path, port: int) -> None:
    log = tmp_path / "log"
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("ROS_", "CYCLONE"))}
    environment["ROS_DOMAIN_ID"] = str(150 + os.getpid() % 50)
    words = ["-p", "policy.name:=hold", "-p", "robot.urdf:=demo", "-p", f"node.metrics_port:={port}"]
    with log.open("w") as out:
        command = [sys.executable, "-m", "vla_ros.cli", "run", "-p", "node.backend:=dds", *words]
        node = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment)
    try:
        deadline = time.monotonic() + 60
        while "call ~/enable to move" not in log.read_text():
            assert node.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        tcp, udp = sockets(node.pid)
    finally:
        node.send_signal(signal.SIGINT)
        node.wait(20)
    assert tcp == ({f"{LOOPBACK}:{port:04X}"} if port else set())
    # DDS-RTPS, section 9.6.1: ports of a domain. Those below the ephemeral range belong to participants.
    first = 7400 + 250 * int(environment["ROS_DOMAIN_ID"])
    bound = {int(address.partition(":")[2], 16) for address in udp}
    ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert {number for number in bound if number < ephemeral} <= set(range(first, first + 250))


def test_a_decompression_bomb_does_not_fill_the_disk(tmp_path, monkeypatch) -> None:
    zstd = pytest.importorskip("backports.zstd")
    from vla_ros_lab.replay import storage

    monkeypatch.setattr(storage, "MAX_CHUNK", 1 << 20)
    bomb = zstd.compress(bytes(64 << 20))
    assert len(bomb) < 64 << 10
    (tmp_path / "bomb.db3.zstd").write_bytes(bomb)
    problem = storage.expand_file(tmp_path / "bomb.db3.zstd", tmp_path / "bomb.db3")
    assert "500 times its size" in problem
    assert (tmp_path / "bomb.db3").stat().st_size <= max(1 << 20, 500 * len(bomb))
