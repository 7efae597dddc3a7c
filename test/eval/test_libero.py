"""Ten tasks of LIBERO's four suites: what enters the policy, and what reaches the simulator."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "data" / "reach"
COMMAND = (sys.executable, "-m", "vla_ros.cli")
CONTRACT = ("--policy", "digest", "-p", "preset:=libero", "-p", "control.clip:=none")
CAMERAS = ("-p", 'features.images:=["image = agent","wrist_image = wrist"]')
SUITES = {"libero_spatial": 3, "libero_object": 3, "libero_goal": 2, "libero_10": 2}

# Runs in LIBERO's Python. The digest is of what openpi's and OFT's evaluations make of the simulator's observation:
# both images turned by 180 degrees, and position, rotation vector (not wrapped) and fingers.
LOG = """
import hashlib, math, os
import numpy as np
from vla_eval.benchmarks.libero.benchmark import LIBEROBenchmark

def note(*words):
    with open(os.environ["LIBERO_LOG"], "a") as log:
        print(*words, file=log)

def make_obs(self, raw, task, own=LIBEROBenchmark.make_obs):
    images = (raw[name][::-1, ::-1].tobytes() for name in ("agentview_image", "robot0_eye_in_hand_image"))
    *axis, cosine = raw["robot0_eef_quat"]
    angle = 2 * math.acos(min(max(cosine, -1.0), 1.0))
    vector = np.array(axis) * angle / math.sqrt(1 - cosine * cosine)
    state = np.concatenate([raw["robot0_eef_pos"], vector, raw["robot0_gripper_qpos"]]).astype(np.float32)
    note(hashlib.sha256(b"".join([*images, state.tobytes(), task["name"].encode()])).hexdigest())
    return own(self, raw, task)

def step(self, action, own=LIBEROBenchmark.step):
    note(*(float(number).hex() for number in action["actions"]))
    return own(self, action)

LIBEROBenchmark.make_obs, LIBEROBenchmark.step = make_obs, step
"""


@pytest.mark.timeout(7200)
@pytest.mark.skipif("LIBERO_PYTHON" not in os.environ, reason="LIBERO_PYTHON names no Python with LIBERO")
def test_ten_tasks_are_equal_through_the_server_and_the_node_and_to_the_published_preprocessing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole episodes, or LIBERO_STEPS of each."""
    (tmp_path / "sitecustomize.py").write_text(LOG)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {os.environ["LIBERO_PYTHON"]} "$@"\n')
    python.chmod(0o755)
    kind = "vla_eval.benchmarks.libero.benchmark:LIBEROBenchmark"
    limit = {"max_steps": int(os.environ["LIBERO_STEPS"])} if "LIBERO_STEPS" in os.environ else {}
    suites = [
        {"benchmark": kind, "name": suite, "episodes_per_task": 1, "max_tasks": count, **limit}
        | {"params": {"suite": suite, "seed": 7}}
        for suite, count in SUITES.items()
    ]
    (tmp_path / "run.yaml").write_text(json.dumps({"output_dir": ".", "benchmarks": suites}))
    monkeypatch.chdir(tmp_path)
    path = os.pathsep.join([str(PACKAGE), *sys.path])

    def run(name: str, *words: str | Path) -> None:
        logs = {"LIBERO_LOG": f"{name}.simulator", "DIGEST_LOG": f"{name}.policy", "PYTHONPATH": path}
        subprocess.run(words, check=True, env={**os.environ, **logs})

    run("node", *COMMAND, "eval", "run.yaml", "--python", python, *CONTRACT, *CAMERAS, "--step-timeout", "600")

    environment = {**os.environ, "DIGEST_LOG": "served.policy", "PYTHONPATH": path}
    serve = [*COMMAND, "serve", "--port", "0", "--with-parent", *CONTRACT, *CAMERAS]
    with subprocess.Popen(serve, stdin=-1, stdout=-1, text=True, env=environment) as server:
        assert server.stdout is not None
        url = next(line for line in server.stdout if line.startswith("serving")).split()[-1]
        harness = ["-m", "vla_eval.cli.main", "run", "--no-docker", "--yes", "--config", "run.yaml"]
        run("served", python, *harness, "--server-url", f"{url}/vla-eval")
        server.terminate()

    found = {}
    for name in ("node", "served"):
        policy = [line.split(maxsplit=1) for line in Path(f"{name}.policy").read_text().splitlines()]
        simulator = Path(f"{name}.simulator").read_text().splitlines()
        at = [index for index, line in enumerate(simulator) if " " in line]
        assert [simulator[index - 1] for index in at] == [digest for digest, _ in policy]
        assert [simulator[index] for index in at] == [action for _, action in policy]
        found[name] = policy
    assert found["node"] == found["served"]
    assert len(found["node"]) >= sum(SUITES.values()) * limit.get("max_steps", 1)
