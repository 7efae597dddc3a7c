from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vla_eval", reason="the library vla-eval is not installed (extra 'dev')")
pytest.importorskip("zmq", reason="the library zmq is not installed (extra 'remote')")

from vla_eval.api import serve_background
from vla_eval.model_servers.predict import PredictModelServer

from test.serve.conftest import Mirror
from test.serve.serving import PATIENCE, served
from vla_ros.config import load
from vla_ros.policies.base import Policy, create
from vla_ros.policies.remote.messages import WireError
from vla_ros.types import Observation

IMAGE = np.full((4, 6, 3), 7, np.uint8)


class Counted(PredictModelServer):
    """Answers [observations of the episode, mean of the image, first state number] in chunks of two."""

    def __init__(self) -> None:
        super().__init__(chunk_size=2)
        self.episodes: list[Any] = []

    def get_action_spec(self) -> Any:
        raise NotImplementedError

    get_observation_spec = get_action_spec

    async def on_episode_start(self, config: Any, ctx: Any) -> None:
        self.episodes.append(config)
        await super().on_episode_start(config, ctx)

    def predict(self, obs: Any, ctx: Any) -> Any:
        if obs["task_description"] == "raise":
            raise ValueError("a bad request")
        row = [ctx.step + 1, obs["images"]["agentview"].mean(), obs["states"][0]]
        return {"actions": np.array([row, row], np.float32)}


def remote(server: str, *options: str) -> Policy:
    given = ["policy.name:=remote", f"policy.server:={server}", f"timeouts.inference:={PATIENCE}", *options]
    policy = create(load((), given))
    policy.load()
    return policy


def seen(instruction: str = "go") -> Observation:
    return Observation({"images.agentview": IMAGE}, instruction, 1, {"states": np.array([1.5, 0, 0])})


@pytest.fixture
def server() -> Iterator[tuple[Counted, str]]:
    model = Counted()
    with serve_background(model) as handle:
        yield model, handle.url


def test_a_model_server_of_vla_eval_answers_one_action_each(server: tuple[Counted, str]) -> None:
    model, url = server
    policy = remote(url, "policy.dialect:=vla_eval")
    session = policy.start_session()
    for expected in (1, 1, 3):  # its chunks have two actions
        np.testing.assert_array_equal(policy.infer(session, seen()).actions, [[expected, 7, 1.5]])
    session.reset()
    np.testing.assert_array_equal(policy.infer(session, seen()).actions, [[1, 7, 1.5]])
    assert len({episode["task"]["name"] for episode in model.episodes}) == 2
    session.reset()
    with pytest.raises(WireError, match="responded with an error: observation_failed: ValueError: a bad"):
        policy.infer(session, seen("raise"))
    np.testing.assert_array_equal(policy.infer(session, seen()).actions, [[1, 7, 1.5]])
    session.close()
    policy.close()


def test_this_packages_server_is_recognised_by_its_path() -> None:
    mirror = Mirror()
    mirror.spec = replace(mirror.spec, action=())
    with served(mirror, config=load((), ["control.execute_steps:=2"])) as (_, port):
        policy = remote(f"ws://127.0.0.1:{port}/vla-eval")
        session = policy.start_session()
        for expected in (1, 1, 2):
            np.testing.assert_array_equal(policy.infer(session, seen()).actions, [[expected, 7, 1.5]])
        session.close()
        policy.close()
