"""What enters the network in training is what enters it on the robot, bit for bit."""

import numpy as np
import pytest

pytest.importorskip("torch", reason="the library torch is not installed (extra 'openvla')")

import torch

from test.policies.oft.conftest import cases, make_policy, observe
from test.training.runs import CPU, OPTIONS, ArmSamples, policy_of


def asked(policy, observation):
    """The request that the policy makes of an observation, and its images, as arrays."""
    request = policy._request(policy.start_session(), observation, policy._images(observation))
    images = getattr(request, "images", None) or [request.image]
    return request, np.stack([np.asarray(image) for image in images])


@pytest.mark.parametrize("family", OPTIONS)
def test_inputs_are_those_of_inference(family):
    folder, settings = OPTIONS[family]
    policy = policy_of(folder, *settings)
    policy.load()
    samples = ArmSamples(policy.spec)
    own = {"state_dropout": 0.0} if family == "groot" else {}
    inputs = policy.trainable(policy._placement(), **own).inputs
    for index in range(20):
        sample = samples[index]
        found = inputs.prepare(sample.observation, sample.actions, sample.is_pad, np.random.default_rng(0))
        request, images = asked(policy, sample.observation)
        np.testing.assert_array_equal(found["images"], images)
        assert found["images"].dtype == images.dtype
        if family in ("openvla", "oft"):
            prompt = request.prompt
            np.testing.assert_array_equal(found["tokens"][: len(prompt)], prompt)
            assert found["tokens"][-1] == 2
            assert not found["slots"][: len(prompt)].any()
            assert found["slots"][len(prompt) : -1].all()
        else:
            np.testing.assert_array_equal(found["tokens"], request.tokens)
        state = getattr(request, "state", None)
        if state is not None:
            state = state() if callable(state) else state
            np.testing.assert_array_equal(found["state"], np.asarray(state, np.float32))
        if family == "groot":
            np.testing.assert_array_equal(found["positions"], request.positions)
    policy.close()


@pytest.mark.parametrize("family", OPTIONS)
def test_actions_return(family):
    """The actions that a network should predict become the recorded ones again where they run on the robot."""
    folder, settings = OPTIONS[family]
    policy = policy_of(folder, *settings)
    policy.load()
    samples = ArmSamples(policy.spec)
    inputs = policy.trainable(policy._placement()).inputs
    sample = samples[8]
    found = inputs.prepare(sample.observation, sample.actions, sample.is_pad, np.random.default_rng(0))
    if family in ("openvla", "oft"):
        back = inputs.statistics.unnormalize(found["actions"].astype(np.float64))
        low, high = inputs.statistics.low, inputs.statistics.high
        wanted = np.where(inputs.statistics.mask, np.clip(sample.actions, low, high), sample.actions)
        np.testing.assert_allclose(back[:, :6], wanted[:, :6], atol=1e-5)
        return
    state = np.concatenate([sample.observation.state[one.key] for one in policy.spec.state])
    back = inputs.processing.robot_actions(found["actions"], state)
    free = ~sample.is_pad[: len(back)]
    wanted = sample.actions[: len(back)][free]
    clipped = np.abs(found["actions"][: len(back), : wanted.shape[1]][free]) >= 1  # GR00T clips to its bounds
    close = np.isclose(back[free], wanted, atol=1e-4)
    assert (close | clipped).all()
    assert close.any()


@pytest.mark.parametrize("variant", ["libero_l1", "aloha_film"])
def test_the_training_pass_predicts_what_openvla_oft_predicts(variant):
    """With FiLM, too: the network that is trained returns the published code's actions."""
    policy = make_policy(variant)
    found = policy.trainable(CPU)
    policy.spec = found.spec
    for case in cases(variant):
        observation = observe(policy, variant, case)
        wanted = case["normalized"]
        zeros, none = np.zeros_like(wanted, np.float64), np.zeros(len(wanted), np.bool_)
        prepared = dict(found.inputs.prepare(observation, zeros, none, np.random.default_rng(0)))
        prepared["actions"] = wanted.astype(np.float32)
        with torch.no_grad():
            error = found.trainee(found.inputs.collate([prepared])).element
        assert float(error.max()) < 1e-4
