import json

import pytest

from vla_ros_lab.eval.graph import PolicyStatus


def follow(states: list[tuple[float, str]]) -> PolicyStatus:
    now = 0.0
    status = PolicyStatus(lambda: now)
    for at, state in states:
        now = 100.0 + at
        told = {"state": state, "explanation": "why", "instruction": "go", "frames": {"dropped": {"replaced": 2}}}
        status.update(json.dumps(told))
    return status


def test_a_stop_is_hopeless_at_once() -> None:
    status = follow([(0, "armed"), (1, "stopped")])
    assert status.stopped == status.hopeless == "why"
    assert (status.instruction, status.dropped) == ("go", 2)


@pytest.mark.parametrize("state", ["holding", "disarmed"])
def test_a_hold_is_hopeless_when_it_lasts(state: str) -> None:
    assert follow([(t, state) for t in range(5)]).hopeless == ""
    status = follow([(t, state) for t in range(7)])
    assert "why" in status.hopeless
    assert status.stopped == ""


def test_motion_restarts_the_wait() -> None:
    assert follow([(t, "armed" if t == 4 else "holding") for t in range(9)]).hopeless == ""


def test_time_without_messages_does_not_count() -> None:
    assert follow([(0, "holding"), (60, "holding")]).hopeless == ""


@pytest.mark.parametrize("text", ["", "[]", "3", "{}", '{"state": "stopped"}', "no JSON"])
def test_other_messages_are_ignored(text: str) -> None:
    status = PolicyStatus()
    status.update(text)
    assert (status.stopped, status.hopeless) == ("", "")
