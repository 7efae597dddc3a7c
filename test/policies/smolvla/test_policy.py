"""The policy as commands and the node use it."""

from dataclasses import replace

import numpy as np
import pytest

from test.policies.golden import IN_FLOAT32, infer_by_command
from test.policies.smolvla.conftest import CASES, DATA, SHIPPED, options
from vla_ros.config import load
from vla_ros.errors import ConfigError
from vla_ros.policies.base import create, policy_of
from vla_ros.types import Observation, PreviousChunk, RawImage


def words(folder, *more):
    chosen = [f"policy.checkpoint:={DATA / folder}", *IN_FLOAT32, *more]
    return chosen + ([f"policy.vlm:={options(DATA / folder).vlm}"] if options(DATA / folder).vlm else [])


@pytest.fixture(scope="module")
def policy():
    loaded = create(load((), ["policy.name:=smolvla", *words("default", "policy.seed:=7")]))
    loaded.load()
    yield loaded
    loaded.close()


def observation(case, **changes):
    images = {key.removeprefix("observation.images."): image for key, image in case.images.items()}
    known = Observation(images, str(case["prompt"]), 1, {"state": np.float64(case["state"])}, noise=case["noise"])
    return replace(known, **changes)


@pytest.mark.parametrize("name", ["default", "aloha"])
def test_the_command_infers_lerobots_chunk(tmp_path, name):
    case = CASES[name][0]
    images = {key.removeprefix("observation.images."): image for key, image in case.images.items()}
    answer = infer_by_command(
        DATA / name, tmp_path, str(case["prompt"]), images, {"state": case["state"]}, case["noise"], words(name)[1:]
    )
    np.testing.assert_allclose(answer["normalized"], case["actions_normalized"], rtol=0, atol=1e-4)
    np.testing.assert_allclose(answer["actions"], case["actions"], rtol=0, atol=2e-4)


def test_the_checkpoint_names_its_policy_and_what_it_takes(policy):
    assert policy_of(DATA / "default") == "smolvla"
    dry = create(load((), ["policy.name:=smolvla", *words("default")])).describe()
    assert dry == policy.spec
    assert dry.image_keys == ("wrist", "front")
    assert [(one.key, one.size) for one in dry.state] == [("state", 6)]
    assert (dry.dimension, dry.horizon, dry.execute_steps, dry.noise) == (6, 50, 50, (50, 32))
    assert dry.continues_chunks


def test_camera_images_are_resized_with_the_same_bits_on_the_device(policy):
    case = CASES["default"][0]
    known = observation(case)
    raw = {key: RawImage(image, processor=policy.spec.processors[key]) for key, image in known.images.items()}
    mine = policy.infer(policy.start_session(), known)
    theirs = policy.infer(policy.start_session(), replace(known, images={}, raw_images=raw))
    np.testing.assert_array_equal(mine.actions, theirs.actions)
    np.testing.assert_allclose(mine.normalized, case["actions_normalized"], rtol=0, atol=1e-4)


def test_a_chunk_continues_the_previous_one(policy):
    case = CASES["default"][0]
    session = policy.start_session()
    first = policy.infer(session, observation(case))
    known = observation(case, noise=-case["noise"])
    free = policy.infer(session, known)
    again = policy.infer(session, replace(known, previous=PreviousChunk(first.actions[10:], 5)))
    distance = [np.abs(chunk.normalized[:5] - first.normalized[10:15]).max() for chunk in (free, again)]
    assert distance[1] < 0.2 * distance[0]


def test_trained_rtc_is_refused():
    policy = create(load((), ["policy.name:=smolvla", "policy.rtc:=trained", *words("default")]))
    with pytest.raises(ConfigError, match=r"policy\.rtc"):
        policy.load()


def test_memory_is_estimated_before_loading(policy):
    plan = policy._memory.plan("float32", "none", "cpu")
    parts = sum(one.numel() * one.element_size() for one in policy.loaded.engine.model.embedding[None])
    assert parts < plan.weights < 2e6
    assert (SHIPPED / "default" / "model.safetensors").stat().st_size < plan.total
