import json
import os
import signal
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("rosbags", reason="the library rosbags is not installed (extra 'dds')")

from rosbags.highlevel import AnyReader

from test.command import VLA_ROS, vla_ros
from vla_ros.cli.main import main
from vla_ros.config import Config, PolicyConfig, load
from vla_ros.config.checkpoints import folder_of
from vla_ros.errors import ConfigError, MissingDependencyError, VlaRosError
from vla_ros.execution.source import PolicySource
from vla_ros.vision.decode import decode_image
from vla_ros_lab.eval import command
from vla_ros_lab.eval.arguments import parse, plan_demo
from vla_ros_lab.eval.demo import check_torch
from vla_ros_lab.eval.port import NodePort
from vla_ros_lab.eval.runner import EpisodeOptions, EpisodeRunner
from vla_ros_lab.sim.arm import TWO_ARMS
from vla_ros_lab.sim.expert import ExpertPolicy
from vla_ros_lab.sim.table import TableEnvironment
from vla_ros_lab.sim.world import TableTop

SEED, EPISODES = 40, 2
MINE = "/models/mine"
OWN = "openvla", "/models/mine", "table_10hz"


def environment() -> dict[str, str]:
    return {**os.environ, "ROS_DOMAIN_ID": str(command.free_domain()), "OMP_NUM_THREADS": "1"}


def demo(*arguments: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    return vla_ros("demo", *arguments, status=status, env=environment())


@dataclass(frozen=True)
class Run:
    output: str
    figures: dict
    bag: Path


@pytest.fixture(scope="module")
def lockstep(tmp_path_factory) -> Run:
    folder = tmp_path_factory.mktemp("demo")
    done = demo(
        *("--episodes", str(EPISODES), "--seed", str(SEED), "--policy", "expert", "--lockstep"),
        *("--json", str(folder / "figures.json")),
        *("--record", str(folder / "bag")),
    )
    figures = json.loads((folder / "figures.json").read_text())
    return Run(done.stdout, figures, folder / "bag")


def topic(bag: Path, name: str) -> list:
    with AnyReader([bag]) as reader:
        connections = [connection for connection in reader.connections if connection.topic == name]
        messages = reader.messages(connections)
        if name == "/camera/image_raw":
            return [decode_image(raw) for _, _, raw in messages]
        return [reader.deserialize(raw, connection.msgtype) for connection, _, raw in messages]


def stamp_of(message) -> int:
    return message.header.stamp.sec * 10**9 + message.header.stamp.nanosec


def test_the_expert_succeeds_and_the_figures_say_so(lockstep):
    assert lockstep.figures["success_rate"] == 1.0
    assert [episode["seed"] for episode in lockstep.figures["episodes"]] == [SEED, SEED + 1]
    for episode in lockstep.figures["episodes"]:
        assert set(episode) >= {"seed", "instruction", "success", "steps", "reason"}
        assert episode["reason"] == "success"
    assert "2 of 2 episodes succeeded" in lockstep.output


def test_every_frame_is_used_once_and_none_is_lost(lockstep):
    frames = lockstep.figures["frames"]
    steps = sum(episode["steps"] for episode in lockstep.figures["episodes"])
    assert (frames["received"], frames["used"], frames["dropped"]) == (steps, steps, {})
    assert frames["received"] == len(topic(lockstep.bag, "/camera/image_raw"))
    for stage in ("preprocess", "inference", "control"):  # the others take no simulated time
        assert 0 <= lockstep.figures["latency_ms"][stage]["p50"] <= lockstep.figures["latency_ms"][stage]["p99"]


def test_lockstep_gives_the_same_actions_as_a_single_process(lockstep):
    """Actions are equal step by step to those without DDS, a second process and a clock."""
    actions: list[list] = []
    with AnyReader([lockstep.bag]) as reader:
        for connection, _, raw in reader.messages():
            if connection.topic == "/vla_policy/instruction":
                actions.append([])
            elif connection.topic == "/vla_policy/action":
                actions[-1].append(reader.deserialize(raw, connection.msgtype).data)
    config = options("--policy", "expert", "--lockstep")
    source = PolicySource(ExpertPolicy(config)).start()
    with TableTop() as world:
        runner = EpisodeRunner(TableEnvironment(world), NodePort(config, source), EpisodeOptions())
        for index in range(EPISODES):
            result = runner.run(SEED + index)
            assert result.steps == lockstep.figures["episodes"][index]["steps"]
            sent = actions[index][-result.steps :]  # earlier ones belong to frames whose commands were discarded
            np.testing.assert_allclose(np.array(sent), result.trace.actions, atol=1e-6)  # m and rad


def test_the_camera_is_upside_down_on_the_wire(lockstep):
    frame = topic(lockstep.bag, "/camera/image_raw")[0]
    with TableTop() as world:
        world.reset(SEED)
        upright = world.render()
    assert frame.image.shape == (224, 224, 3)
    np.testing.assert_array_equal(frame.image[::-1, ::-1], upright)


def test_stamps_increase_and_each_command_answers_a_frame(lockstep):
    frames = [frame.stamp for frame in topic(lockstep.bag, "/camera/image_raw")]
    assert all(np.diff(frames) > 0)
    stamps = {
        name: [stamp_of(message) for message in topic(lockstep.bag, name)]
        for name in ("/joint_states", "/sim/objects", "/arm/joint_command")
    }
    assert stamps["/joint_states"] == stamps["/sim/objects"] == frames
    answered = stamps["/arm/joint_command"]
    assert answered == sorted(set(answered)), "no frame is answered twice"
    assert set(answered) <= set(frames)
    # A command whose result is discarded may be replaced by the next one before the simulation receives it.
    lost = len(frames) - len(answered) - sum(lockstep.figures["frames"]["dropped"].values())
    assert 0 <= lost <= EPISODES
    joints = topic(lockstep.bag, "/joint_states")[0]
    assert joints.name == [f"joint_{number}" for number in range(1, 8)] + ["finger_left", "finger_right"]
    instructions = [message.data for message in topic(lockstep.bag, "/vla_policy/instruction")]
    assert instructions == [episode["instruction"] for episode in lockstep.figures["episodes"]]


def test_a_bag_of_two_arms_is_answered_as_it_was_recorded(tmp_path):
    words = ("--policy", "expert", "--arms", "2", "--actions", "joint_position", "--seed", str(SEED), "--lockstep")
    demo("--episodes", "1", *words, "--record", str(tmp_path / "bag"))
    left, right = (topic(tmp_path / "bag", f"/{side}_arm/joint_command") for side in ("left", "right"))
    assert len(left) == len(right) > 10
    assert left[0].name == list(TWO_ARMS[0].joint_names)
    bag, results = str(tmp_path / "bag"), str(tmp_path / "replay.json")
    chosen = ("--config", "demo_two_arms", "-p", "policy.actions:=joint_position")
    replayed = vla_ros("replay", bag, *chosen, "--json", results)
    assert "The policy does what was recorded" in replayed.stdout


def test_interrupt_ends_both_processes_and_the_bag_can_be_read(tmp_path):
    running = subprocess.Popen(
        [*VLA_ROS, "demo", "--episodes", "500", "--policy", "expert", "--record", str(tmp_path / "bag")],
        env={**environment(), "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        line = running.stdout.readline()
        while line and not line.startswith("table"):
            line = running.stdout.readline()
        children = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()
        assert len(children) == 1
        running.send_signal(signal.SIGINT)
        output, errors = running.communicate(timeout=40)
    finally:
        running.kill()
        running.wait()
    assert running.returncode == 130, output + errors
    assert "Traceback" not in errors
    assert not Path(f"/proc/{children[0]}").exists()
    assert len(topic(tmp_path / "bag", "/arm/joint_command")) > 5


def options(*words: str) -> Config:
    return plan_demo(parse(*words)).config


def planned(*words: str) -> PolicyConfig:
    return options(*words).policy


def test_the_bag_records_when_an_episode_runs(lockstep):
    images = []
    with AnyReader([lockstep.bag]) as reader:
        for connection, _, raw in reader.messages():
            if connection.topic == "/sim/episode":
                runs = reader.deserialize(raw, connection.msgtype).data
                images.append([runs, 0])
            elif connection.topic == "/camera/image_raw" and images:
                images[-1][1] += 1
    steps = [episode["steps"] for episode in lockstep.figures["episodes"]]
    assert [count for runs, count in images if runs] == steps
    assert [runs for runs, _ in images] == [True, False] * EPISODES


def test_an_argument_selects_the_experts_actions():
    assert planned("--policy", "expert").actions == "eef_delta"
    assert planned("--policy", "expert", "--actions", "eef_pose").actions == "eef_pose"
    with pytest.raises(ConfigError, match=r"policy\.actions: an option of the policy 'expert'"):
        planned("--actions", "eef_pose")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--arms", "2", "--task", "push"), "--task push: two arms can only pick"),
        (("--arms", "2", "--objects", "2"), "--objects 2: a scene with two arms always has 4 objects"),
        (("--objects", "1", "--shuffle"), "--objects 1: --shuffle and --switch-at need"),
        (("--lockstep", "--delay-ms", "9"), "--delay-ms has no effect with --lockstep"),
    ],
)
def test_contradicting_arguments_are_refused(words, message):
    with pytest.raises(ConfigError, match=message):
        options("--policy", "expert", *words)


@pytest.mark.parametrize(
    ("words", "name", "checkpoint", "unnorm_key"),
    [
        ((), "openvla", "demo", "table_10hz"),
        (("--policy", "openvla"), "openvla", "demo", "table_10hz"),
        (("--checkpoint", "demo"), "openvla", "demo", "table_10hz"),
        (("-p", "policy.unnorm_key:=other"), "openvla", "demo", "other"),
        (("--policy", "expert"), "expert", None, None),
        (("-p", "policy.name:=hold"), "hold", None, None),
        (("--checkpoint", MINE), "openvla", "/models/mine", ""),
        (("--checkpoint", str(folder_of("demo-pi"))), "pi", str(folder_of("demo-pi")), None),
        (("-p", "policy.checkpoint:=/models/mine"), "openvla", "/models/mine", ""),
        (("-p", "policy.checkpoint:=demo-pi"), "pi", "demo-pi", None),
        (("--checkpoint", "/models/mine", "-p", "policy.unnorm_key:=table_10hz"), *OWN),
    ],
)
def test_another_policy_or_checkpoint_overrides_the_demos_file(words, name, checkpoint, unnorm_key, mine):
    found = planned(*(word.replace(MINE, mine) for word in words))
    own = [getattr(found, option, None) for option in ("checkpoint", "unnorm_key")]
    assert (found.name, *own) == (name, checkpoint and checkpoint.replace(MINE, mine), unnorm_key)


@pytest.mark.parametrize("option", ["bump", "dim", "delay-ms", "camera-hz"])
@pytest.mark.parametrize("value", ["nan", "-1", "inf"])
def test_amounts_are_finite_and_not_negative(option, value, capsys):
    with pytest.raises(SystemExit):
        parse(f"--{option}={value}")
    assert f"--{option}: found '{value}', expected" in capsys.readouterr().err


def test_the_expert_takes_no_checkpoint():
    # Otherwise the expert's success would be mistaken for the checkpoint's.
    with pytest.raises(ConfigError, match=r"policy\.checkpoint: the policy 'expert' .* runs no checkpoint"):
        planned("--policy", "expert", "--checkpoint", "/models/mine")


def test_a_parameter_file_overrides_the_demos_file(tmp_path, mine):
    file = tmp_path / "mine.yaml"
    model = f"{{checkpoint: {mine}, unnorm_key: table_10hz}}"
    file.write_text(f"/**: {{ros__parameters: {{policy: {model}}}}}")
    found = planned("--config", str(file))
    assert (found.name, found.checkpoint, found.unnorm_key) == ("openvla", mine, "table_10hz")


def test_a_checkpoint_that_is_not_there_is_refused_before_anything_starts(capsys):
    assert main(["demo", "--checkpoint", MINE]) == 1
    assert f"policy.checkpoint: {MINE} is neither a folder nor one of demo" in capsys.readouterr().err


@pytest.fixture
def mine(tmp_path):
    """A folder that says it is a checkpoint of OpenVLA."""
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "openvla"}')
    return str(folder)


def test_real_time_leaves_a_core_to_the_simulation(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    assert planned("--real-time").threads == 1
    assert planned("--real-time", "-p", "policy.threads:=2").threads == 2
    assert planned().threads == 0, "in lockstep the simulation waits"


def test_without_torch_the_error_says_what_to_install_and_what_runs_without_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match=r"pip install .*torch.*--policy expert"):
        check_torch(load((), ["policy.name:=openvla"]))
    check_torch(load((), ["policy.name:=expert"]))


def test_a_policy_that_fails_to_load_ends_the_demo_with_the_reason(tmp_path):
    pytest.importorskip("torch", reason="the library torch is not installed (extra 'openvla')")
    (tmp_path / "config.json").write_text('{"model_type": "openvla"}')
    done = demo("--checkpoint", str(tmp_path), "--episodes", "1", status=1)
    assert "config.json: timm_model_ids is []" in done.stderr
    assert "the policy node exited" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_wrong_option_is_refused_before_anything_starts(capsys):
    assert main(["demo", "-p", "control.rte:=1"]) == 1
    assert "control.rate_hz" in capsys.readouterr().err


def test_a_domain_is_free_if_its_ports_are_free():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
        taken.bind(("127.0.0.1", 7400 + 250 * 60 + 10))
        with pytest.raises(VlaRosError, match="ROS_DOMAIN_ID"):
            command.free_domain((60,))
    assert command.free_domain((60,)) == 60


def test_the_users_environment_is_kept():
    assert command.private_graph({"ROS_DOMAIN_ID": "7", "ROS_LOCALHOST_ONLY": "1"}) == {}
    chosen = command.private_graph({})
    assert set(chosen) == {"ROS_DOMAIN_ID", "ROS_AUTOMATIC_DISCOVERY_RANGE"}
    assert chosen["ROS_AUTOMATIC_DISCOVERY_RANGE"] == "LOCALHOST"


def test_a_demo_on_humble_which_ignores_the_range_stays_on_this_host():
    for reach, only in (("", "1"), ("LOCALHOST", "1"), ("SUBNET", None)):
        given = {"ROS_DISTRO": "humble", "ROS_AUTOMATIC_DISCOVERY_RANGE": reach}
        assert command.private_graph(given).get("ROS_LOCALHOST_ONLY") == only
