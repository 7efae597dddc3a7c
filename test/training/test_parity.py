"""What enters the network in training is what enters it in the node, bit for bit."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from test.training.conftest import FAMILIES, opened
from vla_ros.policies.base import Policy
from vla_ros.types import ActionChunk, Observation
from vla_ros_lab.replay import evaluate
from vla_ros_lab.replay.play import ReplayOptions


def newest(observation: Observation) -> int:
    """The stamp of the front camera's image; the other camera lags."""
    return max(image.stamp for image in observation.raw_images.values())


class Witness(Policy):
    """Keeps what replay shows a policy."""

    def __init__(self, policy: Policy) -> None:
        self.spec = policy.spec
        self.seen: dict[int, Observation] = {}

    def infer(self, session: Any, observation: Observation) -> ActionChunk:
        images = {key: np.array(image) for key, image in observation.images.items()}
        self.seen[newest(observation)] = dataclasses.replace(observation, images=images)
        return ActionChunk(np.zeros((self.spec.horizon, self.spec.dimension)), observation.stamp)


def inputs(policy: Any, observation: Observation) -> dict[str, np.ndarray]:
    """The arrays of the network's request, with images as the host prepares them."""
    plain = dataclasses.replace(observation, noise=np.zeros(policy.spec.noise) if policy.spec.noise else None)
    plain = dataclasses.replace(plain, raw_images={})
    request = policy._request(policy.start_session(), plain, policy._images(plain))
    found = {}
    for field in dataclasses.fields(request):
        value = getattr(request, field.name)
        for index, one in enumerate(value if isinstance(value, (list, tuple)) else [value]):
            if not isinstance(one, (int, float, str, type(None))):
                found[f"{field.name}.{index}"] = np.asarray(one() if callable(one) else one)
    return found


@pytest.fixture
def witnessed(bag: Path) -> Any:
    """What the node's own path shows a policy at each frame of the bag."""

    def play(config: Any, policy: Policy) -> dict[int, Observation]:
        witness = Witness(policy)
        witness.load()
        outcome = evaluate.play(evaluate.BagJob(bag, config, ReplayOptions(), None), lambda: witness)
        assert outcome.problem == ""
        return witness.seen

    return play


@pytest.mark.parametrize("name", FAMILIES)
def test_the_tensor_in_training_is_the_tensor_in_the_node(
    name: str, family: Any, bag: Path, witnessed: Any
) -> None:
    config, policy = family(name)
    samples = opened(bag, policy, config)
    seen = witnessed(config, policy)
    assert len(samples) == 39
    rows = np.linspace(0, len(samples) - 1, 20).astype(int).tolist()
    for row in rows:
        ours = samples[row].observation
        theirs = seen[newest(ours)]
        assert ours.instruction == theirs.instruction
        assert list(ours.images) == list(theirs.images)
        mine, other = inputs(policy, ours), inputs(policy, theirs)
        assert mine.keys() == other.keys()
        assert any(one.size > 10_000 for one in mine.values()), "no image"
        for key, value in mine.items():
            np.testing.assert_array_equal(value, other[key], strict=True, err_msg=f"{name} {row} {key}")
    different = inputs(policy, samples[rows[0]].observation), inputs(policy, samples[rows[-1]].observation)
    assert any(not np.array_equal(different[0][key], different[1][key]) for key in different[0])
