import argparse
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="the library torch is not installed (extra 'openvla')")

from tools import forks
from vla_ros.execution.source import PolicySource
from vla_ros.graph import open_graph
from vla_ros.node.policy_node import PolicyNode
from vla_ros_lab.eval import command
from vla_ros_lab.eval.arguments import Plan, parse, plan_demo
from vla_ros_lab.eval.graph import GraphPort
from vla_ros_lab.eval.port import SIMULATED, NodePort
from vla_ros_lab.eval.results import steadiness
from vla_ros_lab.eval.runner import EpisodeOptions, EpisodeRunner
from vla_ros_lab.eval.scene import episode_options, make_table
from vla_ros_models.checkpoint_files import checkpoint_folder, read_manifest
from vla_ros_models.pi.policy import PiPolicy

FOLDER = checkpoint_folder("demo-pi")
SEED = 8000


def planned(*words: str) -> tuple[argparse.Namespace, Plan]:
    arguments = parse(*words)
    return arguments, plan_demo(arguments)


def test_the_checkpoint_is_small_and_complete() -> None:
    files = {path.name: path.stat().st_size for path in FOLDER.iterdir()}
    assert sum(files.values()) < 15e6
    assert {"README.md", "config.json", "tokenizer.json", "policy_preprocessor.json"} < set(files)
    assert {stored.dtype for stored in read_manifest(FOLDER).values()} == {"F16"}


@pytest.mark.parametrize("words", [("--checkpoint", "demo-pi"), ("--policy", "pi")])
def test_the_checkpoint_selects_its_options(words: tuple[str, ...]) -> None:
    config = planned(*words, "--schedule", "append")[1].config
    assert (config.policy.name, config.policy.checkpoint) == ("pi", "demo-pi")
    assert (config.control.rate_hz, config.gripper.threshold, config.control.schedule) == (20.0, 0.5, "append")
    assert config.features.action


def test_guided_chunks_hide_a_delay_of_300_ms() -> None:
    arguments, chosen = planned("--checkpoint", "demo-pi", "--delay-ms", "300", "-p", "policy.device:=cpu")
    source = PolicySource(PiPolicy(chosen.config))
    source.load()
    with closing(make_table(arguments, chosen.config)) as table:
        port = NodePort(chosen.config, source, SIMULATED)
        runner = EpisodeRunner(table, port, episode_options(arguments, chosen.config))
        results = [runner.run(seed) for seed in range(SEED, SEED + 5)]
    source.close()
    assert sum(result.success for result in results) >= 4
    assert steadiness((result.trace.commands for result in results), 20.0)["stalled_share"] == 0


def test_the_benchmark_keeps_finished_rows(tmp_path) -> None:
    script, figures = Path(__file__).parents[2] / "benchmarks" / "schedules.py", tmp_path / "table.json"
    words = ["--episodes", "1", "--delays", "100", "--json", str(figures), "--schedules", "sync"]

    def made(*more: str) -> list[str]:
        printed = tmp_path / "printed"
        process = forks.Fork(forks.script, [str(script), *words, *more, "--", "-p", "policy.device:=cpu"], printed)
        assert process.wait(200) == 0, printed.read_text()
        return printed.read_text().splitlines()

    first, again = made(), made("rtc")
    assert first[-1].startswith("| 100 ms | sync | 1 of 1 |")
    assert first[-1] in again, "without another run"
    assert [line.split(":")[0] for line in again if "%," in line] == ["rtc 100 ms"]


@pytest.mark.parametrize("words", [(), ("--shuffle",)])
def test_the_policy_picks_up_the_named_object(words: tuple[str, ...], monkeypatch) -> None:
    monkeypatch.setenv("ROS_DOMAIN_ID", str(command.free_domain()))
    monkeypatch.delenv("ROS_LOCALHOST_ONLY", raising=False)
    pinned = ("-p", "policy.device:=cpu", "-p", "policy.threads:=1")
    arguments, chosen = planned("--checkpoint", "demo-pi", *pinned, *words)
    with open_graph("dds", (), "error") as graph, closing(make_table(arguments, chosen.config)) as table:
        policy = PiPolicy(chosen.config)
        policy.load()
        node = PolicyNode(graph, graph.create_node("vla_policy"), chosen.config)
        try:
            node.configure(source=PolicySource(policy))
            node.activate()
            port = GraphPort(graph, chosen.config.arms)
            port.wait_for_policy(10.0)
            runner = EpisodeRunner(table, port, EpisodeOptions(max_steps=60))
            results = [runner.run(seed) for seed in range(SEED, SEED + 3)]
        finally:
            node.cleanup()
            policy.close()
    expected = "wrong_object" if words else "success"
    assert [result.reason for result in results] == [expected] * 3
    commands = [result.trace.commands for result in results]
    lengths = [np.unique(each.stamps, return_counts=True)[1].max() for each in commands]
    assert min(lengths) > 8, "each frame asks for one step of the chunk, not for a chunk"
    assert "seam_ratio" in steadiness(commands, 20.0)
