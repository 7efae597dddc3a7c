import heapq
import itertools
import queue
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from vla_ros.contract.spec import ImageFeature, PolicySpec
from vla_ros.policies.base import Policy, Session
from vla_ros.serve.rhythm import WASTE, Rhythms
from vla_ros.serve.worker import Done, ExpiredError, InferenceWorker, Job, RobotState
from vla_ros.types import ActionChunk, Observation

PATIENCE = 30.0
Gaps = Callable[[int], float]  # s from an answer to the next request, by the number of the answer


class Simulation(Policy):
    """Robots and a policy that takes 30 ms and 1 ms a request; stands in for the worker's clock and its inbox."""

    spec = PolicySpec((ImageFeature("image"),), dimension=1, horizon=1)

    def __init__(self, robots: Sequence[Gaps], seconds: float, deadline: float = 10.0) -> None:
        self.now, self._seconds, self._deadline = 0.0, seconds, deadline
        self._count, self._events = itertools.count(), list[tuple[float, int, RobotState]]()
        self._items: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._gaps = {RobotState(): gaps for gaps in robots}
        self.latencies: dict[RobotState, list[float]] = {robot: [] for robot in self._gaps}
        self.batches: list[int] = []
        self.expired = 0
        for place, robot in enumerate(self._gaps):
            self._after(0.001 * place, robot)
        self.worker = InferenceWorker(self, self._deliver, 16, lambda: self.now)
        self.worker._inbox = self  # type: ignore[assignment]
        self.worker.start()
        assert self.worker._thread is not None
        self.worker._thread.join(PATIENCE)
        assert not self.worker._thread.is_alive()

    def _after(self, seconds: float, robot: RobotState) -> None:
        if self.now < self._seconds:
            heapq.heappush(self._events, (self.now + seconds, next(self._count), robot))

    def _advance(self, until: float, one: bool = False) -> None:
        """Submit the requests that come until a time, or the first of them."""
        while self._events and self._events[0][0] <= until:
            when, _, robot = heapq.heappop(self._events)
            self.now = max(self.now, when)
            observation = Observation({"image": np.zeros((1, 1, 3), np.uint8)}, "go", 0)
            self.worker.submit(Job(robot, observation, self.now, self.now + self._deadline))
            if one:
                return
        self.now = max(self.now, until)

    def put(self, item: Any) -> None:
        self._items.put(item)

    def qsize(self) -> int:
        return self._items.qsize()

    def empty(self) -> bool:
        return self._items.empty()

    def get(self, timeout: float = 1e9) -> Any:
        if self._items.empty():
            self._advance(min(self.now + timeout, self._seconds), one=True)
        if self._items.empty() and self.now >= self._seconds:
            return None  # the end
        return self._items.get_nowait()

    def infer(self, session: Session, observation: Observation) -> ActionChunk:
        return ActionChunk(np.zeros((1, 1)), 0)

    def infer_batch(self, requests: Sequence[Any]) -> list[Any]:
        self.batches.append(len(requests))
        self._advance(self.now + 0.030 + 0.001 * len(requests))
        return [self.infer(*request) for request in requests]

    def _deliver(self, done: Sequence[Done]) -> None:
        for each in done:
            if isinstance(each.outcome, ActionChunk):
                self.latencies[each.job.robot].append(self.now - each.job.arrived)
            elif isinstance(each.outcome, ExpiredError):
                self.expired += 1
            taken = self.latencies[each.job.robot]
            self._after(self._gaps[each.job.robot](len(taken)), each.job.robot)

    def rate(self, robots: int | None = None) -> float:
        """Answers per second of the first robots."""
        return sum(map(len, list(self.latencies.values())[:robots])) / self._seconds

    def p50(self) -> float:
        return statistics.median(each for robot in self.latencies.values() for each in robot)


def steady(seconds: float) -> Gaps:
    return lambda number: seconds


def without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rhythms, "due", lambda self, now, wait: set())


@pytest.mark.parametrize("gap", [0.001, 0.003])
def test_eight_robots_share_batches(gap: float) -> None:
    found = Simulation([steady(gap)] * 8, 10.0)
    assert statistics.mean(found.batches[12:]) > 7.9
    assert found.rate() > 190
    assert found.p50() < 0.045


@pytest.mark.parametrize("robots", [1, 2, 3, 5, 7, 12, 15, 32])
def test_no_number_of_robots_is_served_worse(robots: int, monkeypatch) -> None:
    after = Simulation([steady(0.003)] * robots, 10.0)
    without_waiting(monkeypatch)
    before = Simulation([steady(0.003)] * robots, 10.0)
    assert after.rate() > 0.97 * before.rate()
    counts = [len(each) for each in after.latencies.values()]
    assert min(counts) > 0.75 * max(counts)


def adversary(number: int, turn: int = 0) -> float:
    """Ask at once until the server counts on it, then stay away for a while."""
    return 0.5 if (number + turn) % 12 == 11 else 0.001


@pytest.mark.parametrize("adversaries", [1, 8])
def test_robots_that_stay_away_cost_little(adversaries: int, monkeypatch) -> None:
    good = [steady(0.05)] * 3  # never due themselves, so that waits are only ever for the others
    bad = [lambda number, turn=turn: adversary(number, turn) for turn in range(adversaries)]
    after = Simulation([*good, *bad], 30.0)
    without_waiting(monkeypatch)
    before = Simulation([*good, *bad], 30.0)
    assert after.rate(3) > (1 - WASTE - 0.02) * before.rate(3)


def test_a_robot_that_leaves_is_waited_for_once() -> None:
    leaves = [lambda number: 1e6 if number == 20 else 0.001]
    found = Simulation([*[steady(0.001)] * 3, *leaves], 10.0)
    after = found.batches[60:]
    assert set(after) <= {1, 2}
    alone = Simulation([steady(0.001)] * 3, 10.0)
    assert found.rate(3) > 0.9 * alone.rate(3)


def test_no_answer_is_late_because_its_batch_waited() -> None:
    found = Simulation([steady(0.012)] * 2, 5.0, deadline=0.04)
    assert found.expired == 0
    assert max(each for robot in found.latencies.values() for each in robot[8:]) <= 0.07


def test_the_account_limits_waits_in_vain() -> None:
    rhythms, wasted = Rhythms(), 0.0
    for number in range(1000):
        now = 0.04 * number
        rhythms.asked("robot", now)
        rhythms.answered(["robot"], now)
        rhythms.asked("robot", now + 0.001)  # keeps its rhythm
        rhythms.answered(["robot"], now + 0.03)
        lost = 0.015 if rhythms.due(now + 0.03, 0.015) else 0.0
        wasted += lost
        rhythms.charge(lost, 0.03)
    assert 0.5 * WASTE < wasted / (1000 * 0.03) <= WASTE
