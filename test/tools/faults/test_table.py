import os
import random
import time

import pytest

pytest.importorskip("mujoco", reason="the library mujoco is not installed (extra 'sim')")
pytest.importorskip("rosbags", reason="the library rosbags is not installed (extra 'dds')")

from tools.faults.__main__ import main, run_rows
from tools.faults.channel import KINDS
from tools.faults.director import Director
from tools.faults.processes import NodeProcess, environment
from tools.faults.records import Record
from tools.faults.rig import Rig
from tools.faults.row import Reaction
from tools.faults.rows import ROWS, find
from tools.faults.setups import OPTIONS
from vla_ros.config import load
from vla_ros.control.reasons import Reason

SLICE = (
    "obstacle appears, attached object",
    "operator stops in a chunk",
    "ahead at 250 Hz, instruction changes",
    "driver unsubscribes",
    "armed during an inference",
    "twist, late answers",
    "node suspended, operator stops",
    "node's log stalls",
    "clock goes back 10 s",
)


def test_no_invariant_is_broken_under_a_slice_of_the_table() -> None:
    seed = random.SystemRandom().randrange(10**5)
    outcomes = run_rows([find(name) for name in SLICE], 2, seed, 3)
    wrong = {outcome.row.name: outcome.violations for outcome in outcomes if outcome.violations}
    assert not wrong, f"seed {seed}"
    assert all(len(outcome.injections) == 2 and outcome.motions > 5 for outcome in outcomes)


def test_a_node_that_breaks_a_limit_is_detected() -> None:
    outcome = Director(
        find("operator disarms"), 5, 150, {"limits.velocity_scale": "1.0", "limits.max_joint_step": "0.5"}
    ).run(1)
    assert outcome.motions > 5
    assert "velocity" in {violation.partition(":")[0] for violation in outcome.violations}


def test_a_velocity_that_does_not_expire_is_detected(monkeypatch) -> None:
    # On a busy machine a node may be late by what all its threads waited for a processor, which is more than the
    # policy is late. This node has no such excuse.
    monkeypatch.setattr(NodeProcess, "starved", 0.0)
    outcome = Director(find("twist, late answers"), 5, 152, {"timeouts.velocity": "5.0"}).run(1)
    assert "stands" in {violation.partition(":")[0] for violation in outcome.violations}


def test_a_restarted_robot_may_hear_the_status_later_than_commands(monkeypatch) -> None:
    start, take, times = Rig.start_robot, Rig._take, dict[str, float]()

    def restart(rig: Rig, *words: str) -> None:
        times["second" if "first" in times else "first"] = time.monotonic()
        start(rig, *words)

    def hear(rig: Rig, record: Record, arm: str = "") -> None:
        if "second" in times and record.kind == "command":
            times.setdefault("command", time.monotonic())
        if (
            record.kind != "status"
            or "second" not in times
            or time.monotonic() > times.get("command", float("inf")) + 2.0
        ):
            take(rig, record, arm)

    monkeypatch.setattr(Rig, "start_robot", restart)
    monkeypatch.setattr(Rig, "_take", hear)
    outcome = Director(find("driver killed"), 5, 153).run(1)
    assert "command" in times
    assert not outcome.violations


def test_a_node_that_does_not_start_is_a_violation() -> None:
    outcome = Director(find("operator disarms"), 5, 151, {"robot.tip_frame": "nowhere"}).run(1)
    assert not outcome.injections
    assert any("nowhere" in violation for violation in outcome.violations)


def test_every_row_is_unique_and_consistent() -> None:
    names = [row.name for row in ROWS]
    assert len(set(names)) == len(names)
    for row in ROWS:
        load((), [f"{name}:={value}" for name, value in {**OPTIONS, **row.options}.items()])
        assert set(row.reasons) <= {reason.value for reason in Reason}, row.name
        assert all(order.get("kind", "drop") in KINDS for order in row.begin if order["do"] in ("frames", "joints"))
        assert row.begin or row.node or row.robot or row.server or row.absent or row.refused, row.name
        ends = not row.absent and (row.reaction is not Reaction.GOES_ON or row.renews)
        assert (row.within > 0) == ends, row.name


def test_commands_stay_on_this_host_and_in_their_own_domain(monkeypatch) -> None:
    monkeypatch.setenv("ROS_DOMAIN_ID", "0")
    monkeypatch.setenv("ROS_STATIC_PEERS", "192.168.1.7")
    monkeypatch.setenv("CYCLONEDDS_URI", "file:///robot.xml")
    found = environment(180)
    installed = {"ROS_DISTRO", "ROS_VERSION", "ROS_PYTHON_VERSION"}
    assert {name: value for name, value in found.items() if name.startswith("ROS_") and name not in installed} == {
        "ROS_DOMAIN_ID": "180",
        "ROS_AUTOMATIC_DISCOVERY_RANGE": "LOCALHOST",
    }
    assert f"<Tag>vla_ros_faults_{os.getpid()}_180</Tag>" in found["CYCLONEDDS_URI"]


def test_a_row_that_does_not_exist_is_wrong_usage(capsys) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--row", "earthquake"])
    assert "camera silent" in capsys.readouterr().err
