import argparse
import asyncio
import contextlib
import importlib.util
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

pytest.importorskip("msgpack", reason="the library msgpack is not installed (extra 'serve')")

from test.command import VLA_ROS, vla_ros
from vla_ros.cli.main import main
from vla_ros.config import build
from vla_ros.config.checkpoints import folder_of
from vla_ros.config.loading import parse_assignment
from vla_ros.contract.spec import ImageFeature, PolicySpec, StateFeature
from vla_ros.control.command import Command
from vla_ros.errors import ConfigError
from vla_ros_lab.eval.cli import add_arguments, scored_digest, settings_of
from vla_ros_lab.eval.environment import BenchmarkEnvironment, Case
from vla_ros_lab.eval.process import BenchmarkError, BenchmarkProcess
from vla_ros_lab.eval.results import Log
from vla_ros_lab.eval.suites import fit_benchmark
from vla_ros_models.evidence import digest_of

PACKAGE = Path(__file__).parents[1] / "data" / "reach"
REACH = ("reach_benchmark:Reach", "--policy", "reach")
needs_vla_eval = pytest.mark.skipif(
    importlib.util.find_spec("vla_eval") is None, reason="the library vla-eval is not installed (extra 'dev')"
)


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """The benchmark and its policy can be imported, here and in processes, and its actions are logged."""
    monkeypatch.syspath_prepend(str(PACKAGE))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setenv("REACH_LOG", str(tmp_path / "actions"))
    monkeypatch.chdir(tmp_path)
    terminate = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, terminate)


def command(*words: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    """Run `vla-ros eval` in this process; the benchmark has a process of its own."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as errors:
        found = main(["eval", *words])
    done = subprocess.CompletedProcess(words, found, out.getvalue(), errors.getvalue())
    assert found == status, done.stdout + done.stderr
    return done


def evaluate(*words: str, run: Callable[..., Any] = command) -> dict[str, Any]:
    run(*words, "--json", "out.json")
    found: dict[str, Any] = json.loads(Path("out.json").read_text())
    return found


def episodes(found: dict[str, Any]) -> dict[tuple[str, int], dict[str, Any]]:
    return {(task["task"], one["episode_id"]): one for task in found["tasks"] for one in task["episodes"]}


def outcome(found: dict[str, Any]) -> dict[tuple[str, int], tuple[Any, int]]:
    return {key: (one["metrics"].get("success"), one["steps"]) for key, one in episodes(found).items()}


def actions(path: Path | str = "actions") -> list[list[float]]:
    return [[float.fromhex(text) for text in line.split()] for line in Path(path).read_text().splitlines()]


@needs_vla_eval
def test_actions_are_bit_equal_to_those_of_vla_evals_own_runner(tmp_path, monkeypatch) -> None:
    """Through the node, and as rows of the policy's chunks in vla-eval's synchronous loop, without the node."""
    found = evaluate(*REACH, "--episodes", "3", "--seed", "5")
    assert (found["success_rate"], found["episodes"], found["errors"]) == (1.0, 6, 0)
    assert found["low"] == pytest.approx(0.6097, abs=1e-4)
    assert [found[f"{what}_share"] for what in ("held", "limited", "refused")] == [0.0, 0.0, 0.0]
    through_the_node = actions()

    monkeypatch.setenv("REACH_LOG", str(tmp_path / "plain"))
    from reach_benchmark import Reach  # type: ignore[import-not-found]
    from reach_policy import ReachPolicy  # type: ignore[import-not-found]
    from vla_eval.runners.sync_runner import SyncEpisodeRunner

    from vla_ros.config import load
    from vla_ros.types import Observation

    policy = ReachPolicy(load([], ["policy.name:=reach"]))

    class Rows:
        """A connection to a model server that keeps the chunk and sends one row at a time."""

        async def start_episode(self, payload: Any) -> None:
            self.rows: list[Any] = []

        async def end_episode(self, payload: Any) -> None:
            pass

        async def act(self, observation: dict[str, Any]) -> dict[str, Any]:
            if not self.rows:
                state = {"state": observation["states"]}
                observed = Observation({}, observation["task_description"], 0, state)
                self.rows = list(policy.infer(policy.start_session(), observed).actions)
            return {"actions": self.rows.pop(0)}

    benchmark = Reach(seed=5, send_state=True)
    for task in benchmark.get_tasks():
        for index in range(3):
            asyncio.run(
                SyncEpisodeRunner().run_episode(benchmark, {**task, "episode_idx": index}, Rows(), max_steps=30)
            )
    assert through_the_node == actions(tmp_path / "plain")


@needs_vla_eval
def test_vla_eval_run_gets_the_same_actions_from_the_server() -> None:
    """`vla-eval run` with `vla-ros serve`, the node with that server, and with its own policy: the same bits."""
    entry = {"benchmark": "reach_benchmark:Reach", "episodes_per_task": 2, "params": {"seed": 3}}
    words = ("serve", "--policy", "reach", "--port", "0", "--with-parent")
    with subprocess.Popen([*VLA_ROS, *words], stdin=-1, stdout=-1, stderr=subprocess.DEVNULL, text=True) as server:
        assert server.stdout is not None
        url = next(line for line in server.stdout if line.startswith("serving")).split()[-1]
        config = {"server": {"url": f"{url}/vla-eval"}, "output_dir": ".", "benchmarks": [entry]}
        Path("run.json.yaml").write_text(json.dumps(config))
        theirs = [sys.executable, "-m", "vla_eval.cli.main", "run", "--no-docker", "--yes", "-c", "run.json.yaml"]
        subprocess.run(theirs, check=True, capture_output=True, timeout=100)
        served = actions()
        Path("actions").unlink()
        evaluate("run.json.yaml", "--policy", "remote", "-p", f"policy.server:={url}")
        server.terminate()
    assert actions() == served
    Path("actions").unlink()
    evaluate("run.json.yaml", "--policy", "reach")
    assert actions() == served
    shown = command("--compare", "out.json", "Reach_aggregate.json").stdout
    assert "4 of 4, 100.0 %" in shown
    assert "0 only in the first, 0 only in the second" in shown


@needs_vla_eval
def test_a_benchmark_needs_no_pinocchio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its actions are the policy's; the simulated table has kinematics, and says what is missing."""
    (tmp_path / "sitecustomize.py").write_text('import sys\nsys.modules["pinocchio"] = None\n')
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]]))
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)

    def run(*words: str) -> str:
        return subprocess.run([*VLA_ROS, "eval", *words], capture_output=True, text=True, timeout=200).stderr

    assert evaluate(*REACH, "--episodes", "1", run=run)["success_rate"] == 1.0
    assert "run `pip install pin`" in run("table", "--checkpoint", "demo")


@needs_vla_eval
def test_vla_evals_own_tools_read_the_results(capsys) -> None:
    from vla_eval.results.collector import _build_task_result
    from vla_eval.results.export import print_export_summary

    found = evaluate(*REACH, "--episodes", "6", "-p", "policy.gain:=-1.0")
    print_export_summary([found])
    shown = capsys.readouterr().out
    assert "Overall" in shown
    assert "0.0%" in shown
    assert "2 episodes had errors" in shown  # initial state 5 of either task does not exist
    for task in found["tasks"]:
        theirs = _build_task_result(task["task"], task["episodes"], found["metric_keys"])
        assert {name: task[name] for name in ("num_episodes", "num_errors", "mean_success")} == {
            name: theirs[name] for name in ("num_episodes", "num_errors", "mean_success")
        }
    last = episodes(found)["go left", 5]
    assert last["failure_detail"] == "initial state 5 does not exist: the task has 5"
    assert (found["success_rate"], found["episodes"], found["errors"]) == (0.0, 12, 2)


@needs_vla_eval
@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("raise@left/1/0", "RuntimeError: the simulator broke"),
        ("raise@left/1/3", "RuntimeError: the simulator broke"),
        ("die@left/1/2", "the process ended with status 7; its last lines: out of memory"),
        ("size@left/1/2", "'top' is (33, 33, 3), in the first episode it was (32, 32, 3)"),
        ("hang@left/1/2", "no answer to 'step' within 1 s (--step-timeout)"),
    ],
)
def test_an_episode_whose_environment_misbehaves_is_an_error_and_the_rest_goes_on(wrong: str, said: str) -> None:
    found = evaluate(*REACH, "--episodes", "3", "-b", f"wrong={wrong}", "--step-timeout", "1")
    assert (found["episodes"], found["errors"], found["success_rate"]) == (6, 1, 1.0)
    bad = episodes(found)["go left", 1]
    assert said in bad["failure_detail"]
    assert "success" not in bad["metrics"]


@needs_vla_eval
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("-b", "wrong=raise@left/0/1"), "each of 1 ended in an error, or had no command; the first: .*broke"),
        (
            ("--live", "20", "--delay-ms", "1000", "--max-steps", "5"),
            "each of 1 ended in an error, or had no command",
        ),
    ],
)
def test_an_evaluation_that_judged_nothing_fails(words: tuple[str, ...], said: str) -> None:
    """Its status was that of a pass."""
    done = command(*REACH, "--tasks", "0", "--episodes", "1", *words, "--json", "out.json", status=1)
    assert re.search("no episode was judged: " + said, done.stdout)
    assert json.loads(Path("out.json").read_text())["success_rate"] == 0.0


@needs_vla_eval
def test_points_of_a_benchmark_reach_the_policy_aligned_to_its_image() -> None:
    """It takes the goal from the point of the goal's pixel; its camera's name is not the policy's."""
    keys = ("camera.keys:=[image, points]", "camera.topics:=[/top/image, /where/image]", "policy.points:=true")
    node = [word for option in (*keys, "robot.base_frame:=table") for word in ("-p", option)]
    found = evaluate(*REACH, "--episodes", "2", "-b", "points=true", "-b", "side=128", *node)
    assert (found["episodes"], found["errors"], found["success_rate"]) == (4, 0, 1.0)


def test_one_vector_of_a_benchmark_fills_several_of_the_policy() -> None:
    """In the policy's order, if it is as long as all together: GR00T's LIBERO has one for each number."""
    spec = PolicySpec(state=(StateFeature("x", size=1), StateFeature("rest", size=3)))
    environment = SimpleNamespace(sizes={"image": (32, 32)}, vectors={"states": 4})
    stated = [{"name": "Other", "config": {"benchmark": "other:Other"}, "action_spec": {}}]
    options, notes = fit_benchmark(build({}), spec, cast(Any, environment), stated)
    assert 'features.state:=["x + rest = topic.states[4]"]' in options
    assert "state: x + rest = states" in notes
    environment.vectors["states"] = 5
    with pytest.raises(ConfigError, match="state 'x' of 1 numbers: Other sends the vectors states of 5"):
        fit_benchmark(build({}), spec, cast(Any, environment), stated)


def test_a_benchmarks_camera_that_the_options_name_is_the_one_that_is_shown() -> None:
    """``features.images: image = hand`` was refused, or another camera was shown, by their order."""
    environment = SimpleNamespace(sizes={"top": (32, 32), "side": (32, 32)}, vectors={})
    stated = [{"name": "Other", "config": {"benchmark": "other:Other"}, "action_spec": {}}]
    for name in ("top", "side"):
        spec = PolicySpec((ImageFeature("image", camera=name),))
        options, _ = fit_benchmark(build({}), spec, cast(Any, environment), stated)
        found = build(dict(map(parse_assignment, options))).camera
        assert found.topics[found.keys.index(name)] == f"/{name}/image"
    spec = PolicySpec((ImageFeature("image", camera="hand"),))
    with pytest.raises(ConfigError, match="needs the images hand, but Other sends top, side"):
        fit_benchmark(build({}), spec, cast(Any, environment), stated)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("reach_benchmark:Nope", "--policy", "reach"), "reach_benchmark:Nope cannot be opened"),
        (("missing.yaml",), "missing.yaml: no such file"),
        (("libero", "--policy", "reach"), "found benchmark 'libero', expected table"),
        ((*REACH, "--python", "/nowhere/python"), "--python: '/nowhere/python' does not exist"),
        ((*REACH, "--delay-ms", "5"), "need --live HZ"),
        ((*REACH, "--resume"), "--resume: needs --json FILE"),
        (("libero_spatial@mine", "--policy", "reach"), "found protocol 'mine' of libero_spatial, expected one of"),
    ],
)
def test_what_cannot_be_opened_is_refused(words: tuple[str, ...], said: str) -> None:
    assert said in command(*words, status=1).stderr


@needs_vla_eval
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("nothing:Nope", "--policy", "reach"), "No module named 'nothing'"),
        ((*REACH, "-b", "send_state=false"), "state 'state' of 4 numbers: Reach sends the vectors none"),
        ((*REACH, "-p", "policy.camera:=wrist"), "the policy needs the images wrist, but Reach sends top"),
        ((*REACH, "-p", "policy.dimension:=8"), "have 8 numbers"),
        ((*REACH, "--tasks", "up"), "--tasks: found 'up', expected numbers or parts of names of: 0 go left"),
        ((*REACH, "-b", "wrong=raise@left/0/0", "--tasks", "0", "--episodes", "1"), "no episode can be begun"),
    ],
)
def test_what_does_not_fit_is_refused_with_both_sides(words: tuple[str, ...], said: str) -> None:
    assert said in command(*words, status=1).stderr


@needs_vla_eval
def test_live_holds_between_chunks_and_does_not_depend_on_the_machine() -> None:
    live = ("--episodes", "2", "--live", "20", "--delay-ms", "200", "--schedule", "sync")
    first = evaluate(*REACH, *live)
    sent = actions()
    assert first["success_rate"] == 1.0
    assert first["held_share"] > 0.4
    moving = 4  # the first chunk arrives after four steps
    assert [row[:6] for row in sent[:moving]] == [[0.0] * 6] * moving
    assert (sent[0][6], any(sent[moving][:2])) == (-1.0, True)  # open
    after = next(row for row in sent[moving:] if not any(row[:2]))
    assert after[6] == sent[moving][6]  # the last gripper
    Path("actions").unlink()
    assert outcome(evaluate(*REACH, *live)) == outcome(first)
    assert actions() == sent
    waits = evaluate(*REACH, "--episodes", "2")
    assert max(one["steps"] for one in episodes(waits).values()) < min(
        one["steps"] for one in episodes(first).values()
    )


@needs_vla_eval
def test_the_wall_clock_does_not_wait_either() -> None:
    found = evaluate(*REACH, "--episodes", "1", "--live", "20", "--clock", "wall")
    assert found["success_rate"] == 1.0
    assert found["mode"] == "live_wall"
    assert all(one["elapsed_sec"] >= 0.9 * one["seconds"] for one in episodes(found).values())


@needs_vla_eval
def test_what_the_node_changes_is_counted() -> None:
    """Numbers beyond 1 are clipped if ``control.clip`` says so; another convention of the gripper is converted."""
    free = evaluate(*REACH, "--episodes", "1", "-p", "policy.gain:=5.0")
    assert (free["limited_share"], np.abs(actions()).max() > 1) == (0.0, True)
    Path("actions").unlink()
    clipped = evaluate(*REACH, "--episodes", "1", "-p", "policy.gain:=5.0", "-p", "control.clip:=each")
    assert clipped["limited_share"] > 0
    assert np.abs(actions()).max() == 1.0
    words = ("--max-steps", "1", "--tasks", "0", "-p", "control.clip:=each", "-p", "features.tip_step:=[0.2, 0.5]")
    shown = " ".join(command(*REACH, *words).stdout.split())
    assert "in the environment's units; each number clipped to 1" in shown
    assert "limits that shorten" not in shown  # they are in metres
    Path("actions").unlink()
    other = evaluate(*REACH, "--episodes", "1", "-p", "policy.open_value:=1.0")
    assert other["success_rate"] == 1.0
    assert {row[6] for row in actions()} == {-1.0, 1.0}


@needs_vla_eval
def test_resume_runs_what_is_missing_or_was_an_error(tmp_path) -> None:
    whole = outcome(evaluate(*REACH, "--episodes", "3"))
    Path("out.episodes.jsonl").unlink()
    evaluate(*REACH, "--episodes", "1")
    Path("actions").unlink()
    with Path("out.episodes.jsonl").open("a") as log:
        log.write('{"task": "go right", "state": 1, "success": null, "error": "died"}\n{"task": "go ri')
    assert outcome(evaluate(*REACH, "--episodes", "3", "--resume")) == whole
    ran = sum(steps for (_, state), (_, steps) in whole.items() if state)
    assert len(actions()) == ran
    again = command(*REACH, "--episodes", "3", "--resume", "--json", "out.json")
    assert "every episode has been run already" in again.stdout
    other = command(*REACH, "--resume", "--json", "out.json", "-p", "policy.gain:=0.5", status=1)
    assert "was made with param = []" in other.stderr


def test_resume_asks_only_for_what_determines_the_actions(tmp_path: Path) -> None:
    """The notes of a trainer do not; statistics, processors, tokenizer and weights do."""
    folder = shutil.copytree(folder_of("demo"), tmp_path / "copy")
    before = digest_of(folder)
    shutil.copytree(folder_of("demo-pi"), folder / ".cache" / "other")
    for name in ("README.md", "training.json", "train_config.json", "trainer_state.json", "run/state.json"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text('{"note": 1}')
    assert digest_of(folder) == before
    for path in sorted(path for path in folder.iterdir() if path.suffix in (".json", ".safetensors")):
        if not path.name.startswith("train"):
            old = path.read_bytes()
            path.write_bytes(old + b" ")
            assert digest_of(folder) != before, path.name
            path.write_bytes(old)
    assert digest_of(folder) == before


def test_resume_accepts_another_port_of_the_same_policy_server(tmp_path) -> None:
    def resume(*param: str) -> Log:
        return Log(tmp_path / "log", {"benchmark": "table", "param": list(param)}, resume=True)

    resume("policy.server:=ws://[::1]:8100/vla-eval", "policy.horizon:=8")
    resume("policy.server:=ws://[::1]:8101/vla-eval", "policy.horizon:=8")
    for other in ("policy.server:=ws://[::2]:8100/vla-eval", "policy.server:=ws://[::1]:8100"):
        with pytest.raises(ConfigError, match="was made with param = "):
            resume(other, "policy.horizon:=8")
    with pytest.raises(ConfigError, match="was made with param = "):
        resume("policy.server:=ws://[::1]:8100/vla-eval", "policy.horizon:=9")


def test_resume_knows_a_checkpoint_and_options_by_what_they_are_not_by_their_path(tmp_path: Path) -> None:
    """A copy elsewhere did not resume, and other options at the same path did."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    checkpoint, options, benchmark = tmp_path / "a", tmp_path / "a.yaml", tmp_path / "bench.yaml"
    shutil.copytree(folder_of("demo"), checkpoint)
    benchmark.write_text("benchmarks: []")

    def write(file: Path, rate: float, place: Path) -> None:
        told = f"policy: {{checkpoint: '{place}'}}, control: {{rate_hz: {rate}}}"
        file.write_text(f"/**: {{ros__parameters: {{{told}}}}}")

    def resume(*words: Path | str, of: Path = benchmark) -> Log:
        return Log(tmp_path / "log", settings_of(parser.parse_args([str(of), *map(str, words)])), resume=True)

    write(options, 10.0, checkpoint)
    resume("--config", options)
    elsewhere = [tmp_path / name for name in ("b", "b.yaml", "other.yaml")]
    shutil.copytree(checkpoint, elsewhere[0])
    write(elsewhere[1], 10.0, elsewhere[0])
    elsewhere[2].write_text("benchmarks: []")
    resume("--config", elsewhere[1], of=elsewhere[2])
    resume("--config", elsewhere[1], "-p", f"policy.checkpoint:={checkpoint}")
    write(options, 5.0, checkpoint)
    benchmark.write_text("benchmarks: [other]")
    for words, of in ((("--config", options), elsewhere[2]), (("--config", elsewhere[1]), benchmark)):
        with pytest.raises(ConfigError, match="was made with options = "):
            resume(*words, of=of)
    (elsewhere[0] / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="was made with weights = "):
        resume("--config", elsewhere[1], of=elsewhere[2])


@needs_vla_eval
def test_shards_give_the_same_results_as_one_process() -> None:
    Path("two.yaml").write_text(
        "benchmarks:\n"
        "- {benchmark: 'reach_benchmark:Reach', subname: a, episodes_per_task: 2, params: {seed: 1}}\n"
        "- {benchmark: 'reach_benchmark:Reach', subname: b, episodes_per_task: 2, tasks: [go left], max_steps: 3}\n"
    )
    one = outcome(evaluate("two.yaml", "--policy", "reach"))
    assert set(one) == {(f"Reach_a: go {way}", index) for way in ("left", "right") for index in (0, 1)} | {
        ("Reach_b: go left", index) for index in (0, 1)
    }
    assert {value for (task, _), value in one.items() if task.startswith("Reach_b")} == {(False, 3)}
    assert outcome(evaluate("two.yaml", "--policy", "reach", "--shards", "2", run=partial(vla_ros, "eval"))) == one


@needs_vla_eval
def test_two_results_are_compared_by_pairs() -> None:
    command(*REACH, "--episodes", "3", "--json", "a.json")
    command(*REACH, "--episodes", "5", "--json", "b.json", "-p", "policy.gain:=-1.0")
    shown = command("--compare", "a.json", "b.json").stdout
    assert "a.json: 6 of 6, 100.0 %" in shown
    assert "b.json: 0 of 6, 0.0 %" in shown
    assert (
        "6 only in the first, 0 only in the second; McNemar's exact p = 0.03125: a difference; 4 episodes" in shown
    )
    assert "lost: go left, state 0" in shown
    assert "cannot be read" in command("--compare", "a.json", "c.json", status=1).stderr


@needs_vla_eval
def test_the_report_shows_failures_first() -> None:
    pytest.importorskip("av")
    evaluate(*REACH, "--episodes", "2", "-b", "wrong=raise@left/1/3", "--max-steps", "11", "--report", "r.html")
    page = Path("r.html").read_text()
    cards = page.split("Failures first.")[1].split("<h2>")[0]
    assert page.count("data:video/mp4;base64,") == len(list(Path("r_videos").iterdir())) >= 3
    assert cards.index("timeout") < cards.index("success")
    assert "the simulator broke" in page


@needs_vla_eval
def test_ctrl_c_keeps_what_is_done() -> None:
    words = [*VLA_ROS, "eval", *REACH, "--episodes", "2", "-b", "wrong=hang@right/0/1", "--json", "out.json"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("go left 1"):
            break
    time.sleep(0.1)  # any moment of the next episode will do
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=30)
    assert process.returncode == 130, rest
    found = json.loads(Path("out.json").read_text())
    assert (found["episodes"], found["success_rate"]) == (2, 1.0)


def test_the_table_scores_as_the_demo_in_lockstep_does() -> None:
    """The demo runs the node in another process, over the graph; this runs it in the same process."""
    words = ("--checkpoint", "demo", "--episodes", "1", "--seed", "0")
    found, demo = evaluate("table", *words, "--sync"), ("demo", *words, "--lockstep")
    vla_ros(*demo, "--json", "demo.json")
    theirs = json.loads(Path("demo.json").read_text())["episodes"]
    ours = [episodes(found)["table", 0]]
    expected = [(one["metrics"]["success"], one["steps"], one["instruction"]) for one in ours]
    assert [(one["success"], one["steps"], one["instruction"]) for one in theirs] == expected
    assert found["success_rate"] == 1.0
    assert found["config"]["weights"] == digest_of(folder_of("demo"))


def test_scores_state_the_weights_of_the_viewpoint_adapter_that_was_scored(tmp_path: Path) -> None:
    """They stated those of its base alone, as if it had been scored without the adapter."""
    (tmp_path / "view.safetensors").write_bytes(b"an adapter")
    (tmp_path / "view.yaml").write_text(
        f"/**: {{ros__parameters: {{policy: {{checkpoint: demo, view: {tmp_path}/view.safetensors}}}}}}"
    )
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    for words in (["--config", f"{tmp_path}/view.yaml"], ["-p", f"policy.view:={tmp_path}/view.safetensors"]):
        options = parser.parse_args(["table", "--checkpoint", "demo", *words])
        assert scored_digest(options) == digest_of(tmp_path) != digest_of(folder_of("demo"))


@needs_vla_eval
def test_a_hold_of_which_nothing_is_known_is_an_error_not_zeros() -> None:
    opening = {"do": "open", "file": "", "benchmark": REACH[0], "params": {}, "observation_params": {}}
    environment = BenchmarkEnvironment(BenchmarkProcess("", opening, 60.0), [Case("go left", 0)])
    try:
        environment.reset(0)
        environment.apply(Command((), np.zeros(0), 0, "arm", hold=True, action=np.full(7, np.nan)))
        with pytest.raises(BenchmarkError, match="no action is known that keeps the arm"):
            environment.step()
    finally:
        environment.close()
