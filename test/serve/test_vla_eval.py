import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vla_eval", reason="the library vla-eval is not installed (extra 'dev')")

from vla_eval.connection import Connection
from vla_eval.protocol import MessageType, numpy_codec

from vla_ros.config import load
from vla_ros.config.files import config_file
from vla_ros.contract.features import complete_spec
from vla_ros.contract.spec import ImageFeature, PolicySpec, StateFeature
from vla_ros.policies.base import create
from vla_ros.serve import server
from vla_ros.serve.service import Service
from vla_ros.types import ActionChunk, Observation, RawImage
from vla_ros.vision.preprocess import process
from vla_ros.vision.processors import ResizeWithPad
from vla_ros_models.oft.processing import OFTResize

from .conftest import Mirror
from .serving import PATIENCE, served
from .test_server import get

HERE = Path(__file__).parent
IMAGE = np.random.default_rng(0).integers(0, 256, (256, 256, 3), np.uint8)
LIBERO = "vla_eval.benchmarks.libero.benchmark:LIBEROBenchmark"
Start = Callable[..., tuple[Service, int]]


@pytest.fixture(autouse=True)
def unnamed(policy: Mirror) -> None:
    """The actions of ``policy`` are three numbers without a name."""
    policy.spec = replace(policy.spec, action=())


class Pictured(Mirror):
    """Remembers its observations; answers rows 0, 1, 2, ... of an episode's chunks in the units of LIBERO."""

    def __init__(
        self,
        images: tuple[ImageFeature, ...],
        gripper: float = 0.0,
        state: tuple[StateFeature, ...] = (StateFeature("proprio", size=8),),
    ) -> None:
        super().__init__()
        self.spec = PolicySpec(images, state, dimension=7, horizon=6, execute_steps=4)
        self.observed: list[Observation] = []
        self.gripper = gripper

    def infer(self, session: Any, observation: Observation) -> ActionChunk:
        session.seen += 1
        self.observed.append(observation)
        numbers = np.arange(6)[:, None] / 10 + np.arange(6) / 100 + session.seen
        return ActionChunk(np.column_stack([numbers, np.full(6, self.gripper)]), observation.stamp)


def talk(port: int, body: Callable[[Connection], Coroutine[Any, Any, None]], name: str | None = None) -> None:
    """Run ``body`` with vla-eval's client, which has said hello for the benchmark ``name``."""

    async def run() -> None:
        connection = Connection(f"ws://127.0.0.1:{port}/vla-eval", timeout=PATIENCE, max_retries=1)
        await connection.connect(benchmark=name)
        try:
            await body(connection)
        finally:
            await connection.close()

    asyncio.run(run())


def seen(**changes: Any) -> dict[str, Any]:
    return {"images": {"front": IMAGE}, "task_description": "go", "states": np.array([5.0, 0, 0])} | changes


def run_table(port: int, folder: Path, count: int, **params: Any) -> tuple[list[Any], Any]:
    """Episodes with `vla-eval run`; returns them, and what the benchmark sent and got."""
    url, log = f"ws://127.0.0.1:{port}/vla-eval", folder / "log.npz"
    benchmark = {"benchmark": "table_benchmark:TableBenchmark", "episodes_per_task": count}
    benchmarks = [{**benchmark, "params": {"seed": 0, "log": str(log), **params}}]
    (folder / "run.yaml").write_text(
        json.dumps({"server": {"url": url}, "output_dir": str(folder), "benchmarks": benchmarks})
    )
    command = [sys.executable, "-m", "vla_eval.cli.main", "run", "--no-docker", "--yes", "--config", "run.yaml"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, sys.path)])}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(next(folder.glob("*_aggregate.json")).read_text())
    episodes = [episode for task in result["tasks"] for episode in task["episodes"]]
    recorded = np.load(log)
    assert len(recorded["actions"]) == sum(episode["steps"] for episode in episodes)
    return episodes, recorded


@pytest.mark.parametrize(("family", "count", "successes"), [("openvla", 1, 1), ("pi", 3, 2)])
def test_vla_eval_runs_the_demos_checkpoints_and_gets_the_actions_of_one_process(
    tmp_path: Path, family: str, count: int, successes: int
) -> None:
    pytest.importorskip("torch", reason="the library torch is not installed (extra 'openvla')")
    files = [config_file(name) for name in (("demo",) if family == "openvla" else ("demo", "demo_pi"))]
    config = load(files, ["policy.self_test:=false"])
    with served(create(config), config=config) as (_, port):
        episodes, recorded = run_table(port, tmp_path, count, joints=family == "pi")
    assert sum(episode["metrics"]["success"] for episode in episodes) >= successes
    local = create(config)
    local.load()
    processor = local.spec.processors["image"]
    session, rows, before = local.start_session(), [], -1
    columns = (recorded[key] for key in ("images", "instructions", "states", "episodes", "actions"))
    for image, instruction, state, episode, action in zip(*columns, strict=True):
        if episode != before:
            session, rows, before = local.start_session(), [], episode
        if not rows:
            states = {feature.key: state for feature in local.spec.state}
            given = Observation(
                {"image": processor(image)}, str(instruction), 1, states, {"image": RawImage(image)}
            )
            rows = list(local.infer(session, given).actions)
        assert rows.pop(0).tobytes() == action.tobytes()
    local.close()


@pytest.mark.parametrize("image_format", ["png", "jpeg", "raw"])
def test_an_observation_is_answered_with_one_row_and_its_number(
    policy: Mirror, serving: Start, monkeypatch, image_format: str
) -> None:
    monkeypatch.setattr(numpy_codec, "_image_format", image_format)
    _, port = serving()

    async def body(connection: Connection) -> None:
        await connection.start_episode({"task": {"name": "go"}})
        seq = await connection.send(MessageType.OBSERVATION, seen())
        answer = await connection.recv(timeout=PATIENCE)
        assert (answer.type, answer.seq) == (MessageType.ACTION, seq)
        [count, mean, state] = answer.payload["actions"]
        assert (count, state) == (1, 5)
        assert mean == pytest.approx(IMAGE.mean(), abs=0 if image_format != "jpeg" else 1)
        assert (await connection.act(seen()))["actions"][0] == 2  # Mirror executes one of its two rows

    talk(port, body)


def test_rows_come_one_by_one_and_an_episode_drops_the_rest() -> None:
    policy = Pictured((ImageFeature("image"),))

    async def rows(connection: Connection, count: int) -> list[float]:
        return [round((await connection.act(seen(states=np.zeros(8))))["actions"][0], 3) for _ in range(count)]

    async def body(connection: Connection) -> None:
        await connection.start_episode({"task": {}})
        assert await rows(connection, 6) == [1.0, 1.1, 1.2, 1.3, 2.0, 2.1]  # four of six rows of a chunk
        await connection.end_episode({"success": False})
        await connection.start_episode({"task": {}})
        assert await rows(connection, 2) == [1.0, 1.1]
        answer = await connection.act(seen(states=np.zeros(8), task_description="stop"))
        assert answer["actions"][0] == 1.0  # another instruction begins anew
        answer = await connection.act(seen(states=np.zeros(8), task_description="stop", episode_restart=True))
        assert answer["actions"][0] == 1.0

    with served(policy) as (service, port):
        talk(port, body)
        assert len(policy.sessions) == 3  # each start of an episode has its own, as in a process of its own
        asked = service.metrics.registry.get_sample_value
        assert asked("vla_ros_serve_requests_total", {"outcome": "continued"}) == 5
    with served(policy, config=load((), ["control.execute_steps:=1"])) as (_, port):

        async def single(connection: Connection) -> None:
            assert await rows(connection, 3) == [1.0, 2.0, 3.0]

        talk(port, single)


def test_errors_are_messages_and_the_connection_stays_open(serving: Start) -> None:
    _, port = serving()

    async def body(connection: Connection) -> None:
        with pytest.raises(RuntimeError, match="no state 'state'; the request has"):
            await connection.act({"images": {"front": IMAGE}, "task_description": "go"})
        with pytest.raises(RuntimeError, match="a bad request"):
            await connection.act(seen(task_description="raise"))
        with pytest.raises(RuntimeError, match="state 'state' is <f8"):
            await connection.act(seen(states=np.zeros(9)))
        with pytest.raises(RuntimeError, match="expected booleans, integers or floats"):
            await connection.act(seen(states={"__ndarray__": True, "dtype": "|O", "shape": [1], "data": b"x" * 8}))
        seq = await connection.send(MessageType.EPISODE_START, {"task": {"name": "x" * (1 << 20), "more": "x"}})
        answer = await connection.recv(timeout=PATIENCE)
        assert (answer.type, answer.seq) == (MessageType.ERROR, seq)
        assert "found episode_start of" in answer.payload["error"]
        assert (await connection.act(seen()))["actions"][2] == 5

    talk(port, body)


def test_health_and_config_can_only_be_read(serving: Start) -> None:
    service, port = serving()
    assert get(port, "/health")[0] == 200
    before = service.worker.max_batch
    for query in ("", "?max_batch_size=3"):
        status, body = get(port, "/config" + query)
        assert (status, json.loads(body)["config"]) == (200, {"max_batch_size": before})
    assert service.worker.max_batch == before


def test_a_benchmark_that_does_not_read_for_long_stays_connected(serving: Start, monkeypatch) -> None:
    monkeypatch.setattr(server, "_PING", 0.05)
    _, port = serving()

    async def body(connection: Connection) -> None:
        time.sleep(1.0)  # as a simulator that loads a scene: pings are not answered
        assert (await connection.act(seen()))["actions"][0] == 1

    talk(port, body)


LIBERO_IMAGES = (ImageFeature("full_image", OFTResize((224, 224), 0.9)), ImageFeature("wrist", ResizeWithPad()))
LIBERO_STATE = np.array([-0.05, 0.03, 1.17, 3.9, 0.2, -0.1, 0.02, -0.02])  # a rotation vector that is not wrapped


def published_gripper(values: Any) -> Any:
    """vla-eval's servers of OpenVLA and OFT: 0 closed, 1 open in; -1 open, 1 closed out."""
    return -np.sign(2 * values - 1)


@pytest.mark.parametrize("gripper", [0.0, 0.498, 0.502, 0.996])
def test_what_libero_sends_and_gets_is_what_the_published_servers_take_and_answer(gripper: float) -> None:
    policy = Pictured(LIBERO_IMAGES, gripper)
    images = {"agentview": IMAGE, "wrist": IMAGE[::-1, ::-1]}

    async def body(connection: Connection) -> None:
        said = connection.server_info
        assert said["observation_params"] == {
            "send_wrist_image": True,
            "send_state": True,
            "quat_no_antipodal": True,
            "env_seed": 0,
        }
        assert {k: v["format"] for k, v in said["action_spec"].items()} == {
            "position": "delta_xyz",
            "rotation": "axis_angle",
            "gripper": "binary_close_positive",
        }
        assert {"agentview", "wrist", "state", "language"} == said["observation_spec"].keys()
        message = {"images": images, "task_description": "put it on the stove", "states": LIBERO_STATE}
        action = (await connection.act(message))["actions"]
        assert action[-1] == published_gripper(gripper)
        np.testing.assert_array_equal(action[:6], 1 + np.arange(6) / 100)

    with served(policy, config=load((), ["policy.name:=oft"])) as (_, port):
        talk(port, body, LIBERO)
    [observed] = policy.observed
    assert observed.instruction == "put it on the stove"
    np.testing.assert_array_equal(observed.state["proprio"], LIBERO_STATE)
    for feature, image in zip(LIBERO_IMAGES, images.values(), strict=True):  # upright already: not turned again
        expected = process(RawImage(np.ascontiguousarray(image), processor=feature.processor))
        np.testing.assert_array_equal(observed.images[feature.key], expected)


def test_a_state_vector_holds_the_policys_vectors_in_turn() -> None:
    """As GR00T's of LIBERO: x, y, z, roll, pitch, yaw and gripper."""
    sizes = {"x": 1, "rotation": 5, "gripper": 2}
    policy = Pictured(LIBERO_IMAGES, state=tuple(StateFeature(key, size=size) for key, size in sizes.items()))
    message = {"images": {"agentview": IMAGE, "wrist": IMAGE}, "task_description": "go"}

    async def body(connection: Connection) -> None:
        await connection.act(message | {"states": LIBERO_STATE})
        await connection.act(message | {"states": LIBERO_STATE[1:].tolist(), "x": [7.0], "episode_restart": True})
        for vector in (np.zeros(7), 1.0, []):
            with pytest.raises(RuntimeError, match="no state 'x'; the request has"):
                await connection.act(message | {"states": vector, "episode_restart": True})

    with served(policy) as (_, port):
        talk(port, body)
    found = [np.concatenate([seen.state[key] for key in sizes]) for seen in policy.observed]
    np.testing.assert_array_equal(found, [LIBERO_STATE, [7.0, *LIBERO_STATE[1:]]])


@pytest.mark.parametrize(
    ("keys", "names", "expected"),
    [
        (("image",), ("agentview", "wrist"), "agentview"),
        (("image", "image2"), ("agentview", "wrist"), "agentview wrist"),
        (("observation/wrist_image", "observation/image"), ("agentview", "wrist"), "wrist agentview"),
        (("left", "hand", "right"), ("right", "rgb_gripper", "rgb_static"), "rgb_static rgb_gripper right"),
        (("agent", "agentview"), ("agentview", "other"), "other agentview"),
    ],
)
def test_images_are_mapped_by_name_then_by_wrist_then_in_order(
    keys: tuple[str, ...], names: tuple[str, ...], expected: str
) -> None:
    policy = Pictured(tuple(map(ImageFeature, keys)))
    sent = {name: np.full((4, 4, 3), number, np.uint8) for number, name in enumerate(names)}

    async def body(connection: Connection) -> None:
        await connection.act({"images": sent, "task_description": "go", "state": np.zeros(8)})

    with served(policy) as (_, port):
        talk(port, body)
    found = [names[policy.observed[0].images[key][0, 0, 0]] for key in keys]
    assert found == expected.split()


def test_the_option_image_decides_first() -> None:
    policy = Pictured((ImageFeature("image"),))
    sent = {name: np.full((4, 4, 3), number, np.uint8) for number, name in enumerate(("a", "b", "c"))}

    async def body(connection: Connection) -> None:
        await connection.act({"images": sent, "task_description": "go", "eef": np.zeros(8)})

    with served(policy, aliases={"image": "b", "proprio": "eef"}) as (_, port):
        talk(port, body)
    assert policy.observed[0].images["image"][0, 0, 0] == 1


def test_a_policy_whose_action_does_not_fit_is_refused_at_hello(policy: Mirror, caplog) -> None:
    joints = load((), ["features.action:=[arm.joint_position, 'arm.gripper[0..1]']"])
    policy.spec = complete_spec(PolicySpec(action=(), dimension=8, uses_instruction=False), joints)

    async def body(connection: Connection) -> None:
        await connection.send(MessageType.HELLO, {"protocol_version": 1, "benchmark": LIBERO})
        answer = await connection.recv(timeout=PATIENCE)
        assert answer.type == MessageType.ERROR
        for side in ("arm.joint_position[rad] + arm.gripper[0..1] (8 numbers)", LIBERO, "(7 numbers)"):
            assert side in answer.payload["error"]
        with pytest.raises(RuntimeError, match="do not fit the benchmark"):
            await connection.act({"images": {"a": IMAGE}})
        await connection.send(MessageType.HELLO, {"protocol_version": 1, "benchmark": "my_own:Benchmark"})
        answer = await connection.recv(timeout=PATIENCE)
        assert answer.type == MessageType.HELLO
        assert {k: v["format"] for k, v in answer.payload["action_spec"].items()} == {
            "joints": "joint_positions",
            "gripper": "continuous_01",
        }

    with served(policy, config=joints) as (_, port):
        talk(port, body)
    assert "do not fit the benchmark" in caplog.text


def test_benchmarks_are_answered_in_batches(policy: Mirror, serving: Start) -> None:
    _, port = serving()

    async def run() -> None:
        connections = [Connection(f"ws://127.0.0.1:{port}/vla-eval", timeout=PATIENCE) for _ in range(4)]
        for connection in connections:
            await connection.connect()
        policy.may_answer.clear()
        acts = [asyncio.create_task(connection.act(seen())) for connection in connections]
        await asyncio.sleep(0.5)
        policy.may_answer.set()
        for action in await asyncio.gather(*acts):
            assert action["actions"][2] == 5
        for connection in connections:
            await connection.close()

    asyncio.run(run())
    assert len(policy.sessions) == 4
