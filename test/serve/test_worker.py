import queue
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from vla_ros.errors import DeviceLostError, OutOfMemoryError, VlaRosError
from vla_ros.serve.worker import BusyError, Done, ExpiredError, InferenceWorker, Job, RobotState, WorkerState
from vla_ros.types import ActionChunk, Observation

PATIENCE = 20.0


class Bench:
    """A worker with a clock that the test sets."""

    def __init__(self, policy: Any, max_batch: int = 4) -> None:
        self.now, self.policy = 100.0, policy
        self.ends: queue.SimpleQueue[Done] = queue.SimpleQueue()
        self.worker = InferenceWorker(policy, self.deliver, max_batch, lambda: self.now)
        self.worker.start()

    def deliver(self, done: Sequence[Done]) -> None:
        for each in done:
            self.ends.put(each)

    def ask(self, robot: RobotState | None = None, text: str = "go", seconds: float = 10.0, **given: Any) -> Job:
        image = np.zeros((2, 2, 3), np.uint8)
        observation = Observation({"image": image}, text, 7, state={"state": np.array([1.0, 2.0, 3.0])})
        job = Job(robot or RobotState(), observation, self.now, self.now + seconds, **given)
        self.worker.submit(job)
        return job

    def busy(self) -> Job:
        """Keep the policy busy with a request until :meth:`done`."""
        self.policy.may_answer.clear()
        job = self.ask()
        assert self.policy.asked.acquire(timeout=PATIENCE)
        return job

    def done(self, count: int = 1) -> list[Done]:
        self.policy.may_answer.set()
        return [self.ends.get(timeout=PATIENCE) for _ in range(count)]


@pytest.fixture
def bench(policy: Any) -> Iterator[Bench]:
    made = Bench(policy)
    yield made
    policy.may_answer.set()
    assert made.worker.stop(PATIENCE)


def test_waiting_requests_are_answered_as_batches_in_order(bench: Bench) -> None:
    first = bench.busy()
    others = [bench.ask() for _ in range(6)]
    done = bench.done(7)
    assert [each.job for each in done] == [first, *others]
    assert bench.policy.batches == [1, 4, 2]
    assert [each.batch for each in done] == [1, 4, 4, 4, 4, 2, 2]
    assert bench.policy.threads == {bench.worker._thread.ident}  # type: ignore[union-attr]
    assert threading.get_ident() not in bench.policy.threads


def test_batches_have_the_prepared_sizes(policy, monkeypatch) -> None:
    def prepare(batch: int) -> bool:
        if batch > 4:
            raise OutOfMemoryError("no room for 8")
        return True

    monkeypatch.setattr(policy, "prepare", prepare)
    bench = Bench(policy, max_batch=16)
    bench.busy()
    for _ in range(7):
        bench.ask()
    bench.done(8)
    assert policy.batches == [1, 4, 2, 1]
    assert bench.worker.stop(PATIENCE)


def test_a_policy_without_batches_answers_one_by_one(policy, monkeypatch) -> None:
    monkeypatch.setattr(policy, "prepare", lambda batch: False)
    bench = Bench(policy)
    bench.busy()
    bench.ask()
    bench.ask()
    assert [each.batch for each in bench.done(3)] == [1, 1, 1]
    assert bench.worker.stop(PATIENCE)


def test_an_expired_request_is_not_computed(bench: Bench) -> None:
    bench.busy()
    late, kept = bench.ask(seconds=1.0), bench.ask(seconds=5.0)
    bench.now += 2.0
    outcomes = {each.job: each.outcome for each in bench.done(3)}
    assert bench.policy.batches == [1, 1]
    assert isinstance(outcomes[kept], ActionChunk)
    assert isinstance(outcomes[late], ExpiredError)
    assert str(outcomes[late]) == "deadline exceeded: queued 2.00 s (limit 1.00 s)"


def test_a_request_that_cannot_be_answered_in_time_is_refused(bench: Bench) -> None:
    bench.busy()
    bench.now += 1.0  # a batch takes a second
    bench.done()
    bench.busy()
    for _ in range(4):
        bench.ask(seconds=2.5)  # the rest of this batch, then theirs
    with pytest.raises(BusyError, match=r"over capacity: .* about 3.00 s \(limit 2.50 s\), behind 4 requests"):
        bench.ask(seconds=2.5)
    bench.ask(seconds=3.5)
    assert len(bench.done(6)) == 6


def test_an_idle_worker_accepts_short_deadlines_after_a_slow_batch(bench: Bench) -> None:
    bench.busy()
    bench.now += 1.0
    bench.done()
    for _ in range(3):
        bench.ask(seconds=0.3)
        assert isinstance(bench.done()[0].outcome, ActionChunk)


@pytest.mark.parametrize(
    ("text", "reason"), [("raise", "a bad request"), ("raise odd", "the server's log says why")]
)
def test_a_failing_request_does_not_affect_its_batch(bench: Bench, text: str, reason: str) -> None:
    bench.busy()
    bench.ask()
    bad = bench.ask(text=text)
    bench.ask()
    done = {each.job: each.outcome for each in bench.done(4)}
    assert isinstance(done[bad], VlaRosError)
    assert reason in str(done[bad])
    assert sum(isinstance(outcome, ActionChunk) for outcome in done.values()) == 3


class Panic(BaseException):
    """As a panic of a library in Rust: no Exception."""


def too_few(answers: list[Any]) -> list[Any]:
    return answers[:-1]


def too_many(answers: list[Any]) -> list[Any]:
    return [*answers, answers[-1]]


def of_another_kind(answers: list[Any]) -> list[Any]:
    return [None, *answers[1:]]


def panic(answers: list[Any]) -> list[Any]:
    raise Panic("a regular expression")


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("wrong", [too_few, too_many, of_another_kind, panic])
def test_every_request_is_answered_whatever_the_policy_returns(bench: Bench, monkeypatch, wrong, single) -> None:
    """``single``: also a batch of one goes wrong, so that no request can be computed."""
    whole = bench.policy.infer_batch
    monkeypatch.setattr(
        bench.policy,
        "infer_batch",
        lambda requests: wrong(whole(requests)) if single or len(requests) > 1 else whole(requests),
    )
    first = bench.busy()
    others = [bench.ask() for _ in range(5)]
    done = bench.done(6)
    assert {each.job for each in done} == {first, *others}
    assert {isinstance(each.outcome, ActionChunk) for each in done} == {not single}
    assert bench.worker.state is WorkerState.READY


def test_requests_of_a_worker_that_dies_are_answered(bench: Bench, monkeypatch) -> None:
    """Those of the batch, those that wait, and those that are sent meanwhile."""

    def broken(*given: Any) -> None:
        raise MemoryError

    bench.busy()
    waiting = [bench.ask() for _ in range(3)]
    monkeypatch.setattr(bench.worker._rhythms, "answered", broken)
    done = bench.done(4)
    assert set(waiting) < {each.job for each in done}
    assert all(isinstance(each.outcome, BusyError) for each in done)
    with pytest.raises(BusyError):
        bench.ask()


def test_requests_of_disconnected_robots_are_not_computed(bench: Bench) -> None:
    bench.busy()
    left = bench.ask(wanted=lambda: False)
    bench.ask()
    outcomes = {each.job: each.outcome for each in bench.done(3)}
    assert "robot disconnected" in str(outcomes[left])
    assert bench.policy.batches == [1, 1]
    assert sum(isinstance(outcome, ActionChunk) for outcome in outcomes.values()) == 2


def test_draining_answers_waiting_requests_and_accepts_no_more(bench: Bench) -> None:
    bench.busy()
    bench.ask()
    bench.worker.drain()
    with pytest.raises(BusyError, match="shutting down"):
        bench.ask()
    assert all(isinstance(each.outcome, ActionChunk) for each in bench.done(2))
    assert bench.worker.stop(PATIENCE)
    assert bench.worker.state is WorkerState.ENDED


def test_a_lost_device_ends_the_worker(bench: Bench, monkeypatch) -> None:
    def lost(requests: Any) -> Any:
        raise DeviceLostError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(bench.policy, "infer_batch", lost)
    bench.ask()
    assert isinstance(bench.done()[0].outcome, VlaRosError)
    assert bench.worker.state is WorkerState.FAILED
    assert isinstance(bench.worker.error, DeviceLostError)
    with pytest.raises(BusyError, match="the device failed"):
        bench.ask()


def test_an_error_of_loading_is_raised(policy, monkeypatch) -> None:
    def load(progress: Any) -> None:
        raise VlaRosError("no such checkpoint")

    monkeypatch.setattr(policy, "load", load)
    with pytest.raises(VlaRosError, match="no such checkpoint"):
        Bench(policy)
