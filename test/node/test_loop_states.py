"""The loop's two states: docs/architecture.md has every pair and every change of it, and nothing else happens."""

import re
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from live_loop import LiveLoop, TimedPolicy, every

from vla_ros.config import build
from vla_ros.contract.components import parse_components
from vla_ros.contract.spec import PolicySpec
from vla_ros.control.clock import SimulatedClock
from vla_ros.control.mode import Mode
from vla_ros.control.reasons import Reason
from vla_ros.types import ActionChunk, Observation

PAGE = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text(encoding="utf-8")
LIVES, SECONDS = 60, 6.0
Changes = dict[str, set[str]]  # by pair, the pairs that follow it


def listed() -> Changes:
    """The table of the page."""
    section = PAGE.split("## The two states of the control loop\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(\w+, \w+)` \|(.*)$", section, re.MULTILINE)
    return {pair: set(re.findall(r"`(\w+, \w+)`", cells)) for pair, cells in rows}


class WatchfulClock(SimulatedClock):
    """Looks at the loop each time that anything reads the time, so that no change of its state is missed."""

    look: Callable[[], object] = staticmethod(lambda: None)

    def steady(self) -> float:
        self.look()
        return super().steady()


class Unreliable(TimedPolicy):
    """Turns every joint, and fails once in ten times."""

    def __init__(self, horizon: int, random: np.random.Generator) -> None:
        super().__init__(horizon)
        self.spec = PolicySpec(action=parse_components("arm.joint_delta", action=True), horizon=horizon)
        self.random = random

    def infer(self, session: Any, observation: Observation) -> ActionChunk:
        self.asked.append(observation)
        self.during()
        if self.random.random() < 0.1:
            raise RuntimeError("the model broke")
        return ActionChunk(np.full((self.spec.horizon, 7), 0.01), observation.stamp)


class Eventful:
    """A loop to which things happen at any time, and the pairs that it passes through."""

    def __init__(self, seed: int) -> None:
        self.random = random = np.random.default_rng(seed)
        self.live = live = LiveLoop(
            Unreliable(int(random.choice([1, 8])), random),
            every(1 / 30, 300),
            clock_type=WatchfulClock,
            control__rate_hz=float(random.choice([5.0, 10.0])),
            control__schedule=str(random.choice(["sync", "append"])),
            control__command_rate_hz=float(random.choice([0.0, 50.0])),
            limits__max_joint_acceleration=float(random.choice([0.0, 1.0])),
            takeover__input=str(random.choice(["none", "leader"])),
            takeover__leader="/leader",
            timeouts__inference=0.5,
        )
        slowest = float(random.choice([0.0, 0.05, 0.3, 0.7]))
        live.follows, live.policy.during = True, lambda: live.clock.sleep(random.uniform(0, slowest))
        self.passed: list[str] = []
        assert isinstance(live.clock, WatchfulClock)
        live.clock.look = self.look
        live.clock.after(0.5, self.happen)

    def look(self) -> None:
        pair = ", ".join(state.value for state in self.live.loop.state)
        if not self.passed or self.passed[-1] != pair:
            self.passed.append(pair)

    def happen(self) -> None:
        safety = self.live.safety
        what = self.random.choice(["hold", "task", "takeover", "rate"])
        if safety.mode is not Mode.AUTONOMOUS:
            safety.take_over(Mode.AUTONOMOUS)
        elif what == "hold":
            safety.hold(Reason.NO_INSTRUCTION)
            safety.clear(Reason.NO_INSTRUCTION)
        elif what == "task":
            self.live.inputs.set_instruction(str(self.random.random()))
        elif what == "takeover":
            safety.take_over(Mode.PAUSED)
        else:
            rate = float(self.random.choice([0.0, 50.0]))
            self.live.options.current = build({"control.command_rate_hz": rate}, self.live.options.current)
        self.live.clock.after(self.random.exponential(0.3), self.happen)


def test_the_loop_passes_through_the_pairs_of_the_page_and_no_others() -> None:
    changes: Changes = defaultdict(set)
    for seed in range(LIVES):
        eventful = Eventful(seed)
        eventful.live.run(SECONDS)
        for before, after in pairwise(eventful.passed):
            changes[before].add(after)
    assert changes == listed()
