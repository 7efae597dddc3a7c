"""When the demo stops waiting for the policy node: its own words decide, and only what was heard counts."""

from __future__ import annotations

import json

import pytest

from vla_ros.sim.status import PolicyStatus


class Clock:
    """Seconds, set by the test."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def said(state: str, explanation: str = "why") -> str:
    return json.dumps({"state": state, "explanation": explanation})


def follow(states: list[tuple[float, str]]) -> PolicyStatus:
    clock = Clock()
    status = PolicyStatus(clock)
    for at, state in states:
        clock.now = 100.0 + at
        status.hear(said(state))
    return status


def test_a_stop_is_hopeless_at_once() -> None:
    status = follow([(0, "armed"), (1, "stopped")])
    assert status.stopped == status.hopeless == "why"


@pytest.mark.parametrize("state", ["holding", "disarmed"])
def test_a_hold_is_hopeless_when_it_lasts(state: str) -> None:
    assert follow([(t, state) for t in range(5)]).hopeless == ""
    status = follow([(t, state) for t in range(7)])
    assert "why" in status.hopeless
    assert status.stopped == ""


def test_motion_in_between_begins_the_wait_anew() -> None:
    assert follow([(t, "armed" if t == 4 else "holding") for t in range(9)]).hopeless == ""


def test_time_in_which_nothing_was_heard_does_not_count() -> None:
    assert follow([(0, "holding"), (60, "holding")]).hopeless == ""


@pytest.mark.parametrize("text", ["", "[]", "3", "{}", '{"state": "stopped"}', "no JSON"])
def test_what_is_no_status_is_left_alone(text: str) -> None:
    status = PolicyStatus()
    status.hear(text)
    assert (status.stopped, status.hopeless) == ("", "")
