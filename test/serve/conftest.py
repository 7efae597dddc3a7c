"""A policy that shows in its answer what it was asked, and a server for it."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

pytest.importorskip("msgpack", reason="the library msgpack is not installed (extra 'serve')")
pytest.importorskip("websockets", reason="the library websockets is not installed (extra 'serve')")
pytest.importorskip("prometheus_client", reason="the library prometheus_client is not installed (extra 'serve')")

from vla_ros.contract.spec import ImageFeature, PolicySpec, StateFeature
from vla_ros.errors import VlaRosError
from vla_ros.policies.base import Policy, Session
from vla_ros.serve.service import Service
from vla_ros.types import ActionChunk, Observation

from .serving import PATIENCE, served


class Counting(Session):
    """Counts observations since the episode began."""

    def __init__(self) -> None:
        self.seen, self.closed = 0, False

    def reset(self) -> None:
        self.seen = 0

    def close(self) -> None:
        self.closed = True


class Mirror(Policy):
    """Answers [observations of the episode, mean of the image, first state number]; can be made to wait or fail."""

    def __init__(self) -> None:
        self.spec = PolicySpec(
            (ImageFeature("image"),),
            (StateFeature("state", size=3),),
            dimension=3,
            horizon=2,
            execute_steps=1,
            noise=(2, 3),
            continues_chunks=True,
        )
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.asked = threading.Semaphore(0)
        self.batches: list[int] = []
        self.sessions: list[Counting] = []
        self.threads: set[int] = set()

    def start_session(self) -> Counting:
        self.sessions.append(Counting())
        return self.sessions[-1]

    def infer(self, session: Counting, observation: Observation) -> ActionChunk:
        if observation.instruction.startswith("raise"):
            raise {"raise": VlaRosError, "raise odd": KeyError}[observation.instruction]("a bad request")
        session.seen += 1
        row = [session.seen, float(observation.images["image"].mean()), float(observation.state["state"][0])]
        noise = 0.0 if observation.noise is None else observation.noise
        if observation.previous is not None:
            noise = noise + observation.previous.actions.sum() * observation.previous.delay
        return ActionChunk(np.array([row, row]) + noise, observation.stamp, info={"logit_margins": (0.5,)})

    def infer_batch(self, requests: Sequence[Any]) -> list[ActionChunk | VlaRosError]:
        self.batches.append(len(requests))
        self.threads.add(threading.get_ident())
        self.asked.release()
        assert self.may_answer.wait(PATIENCE)
        return [self.infer(*request) for request in requests]


@pytest.fixture
def policy() -> Iterator[Mirror]:
    made = Mirror()
    yield made
    made.may_answer.set()


@pytest.fixture
def serving(policy: Mirror) -> Iterator[Callable[..., tuple[Service, int]]]:
    with contextlib.ExitStack() as stack:

        def start(**given: Any) -> tuple[Service, int]:
            found = stack.enter_context(served(policy, **given))
            stack.callback(policy.may_answer.set)
            return found

        yield start
