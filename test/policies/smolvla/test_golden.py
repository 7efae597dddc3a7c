"""Compares with lerobot 0.6.1: tokens are equal, images within rounding, actions within 1e-4 normalised."""

import numpy as np
import pytest

from test.policies.smolvla.conftest import CASES, EACH, infer, request
from vla_ros_models.smolvla.network import pad_expert

CHUNK = 1e-4


@pytest.mark.parametrize("case", EACH)
def test_chunk(loaded, case):
    model = loaded(case.folder)
    asked = request(model, case)
    for image, probe in zip(asked.images, case["pixel_probe"], strict=False):  # missing cameras come last
        np.testing.assert_allclose((2 * image - 1).transpose(2, 0, 1)[:, ::17, ::19], probe, rtol=0, atol=5e-7)
    *tokens, state = asked.tokens[-len(case.tokens) - 1 :]
    assert state == 0
    np.testing.assert_array_equal(tokens, case.tokens)
    np.testing.assert_allclose(
        asked.make_state()[: len(case["state"])], case["state_normalized"][: len(case["state"])], atol=1e-6
    )
    [chunk] = infer(model, asked)
    np.testing.assert_allclose(chunk, case["actions_normalized"], rtol=0, atol=CHUNK)
    robot = model.processing.actions.unnormalize(chunk)
    np.testing.assert_allclose(robot, case["actions"], rtol=0, atol=2e-4)


@pytest.mark.parametrize("size", [2, 4])
def test_batch_equals_single_requests(loaded, size):
    """Prompts of different lengths, with and without a previous chunk."""
    cases = (CASES["default"] + CASES["default_rtc"])[:size]
    model = loaded("default")
    for chunk, case in zip(infer(model, *(request(model, case) for case in cases)), cases, strict=True):
        np.testing.assert_allclose(chunk, case["actions_normalized"], rtol=0, atol=CHUNK)


def test_padded_features_change_nothing(loaded):
    """On a GPU the expert is wider, with zeros."""
    case, model = CASES["default"][0], loaded("default")
    plain = model.engine.model
    wide = pad_expert(plain, 128)
    assert wide.expert.shape.hidden_size == 128 > plain.expert.shape.hidden_size
    model.engine.model, kept = wide, model.engine._caches
    model.engine._caches = {}
    try:
        [chunk] = infer(model, request(model, case))
    finally:
        model.engine.model, model.engine._caches = plain, kept
    np.testing.assert_allclose(chunk, case["actions_normalized"], rtol=0, atol=CHUNK)


def test_every_part_of_the_input_counts(loaded):
    """Wrong inputs move the chunk far more than the tolerance."""
    case, model = CASES["default"][0], loaded("default")

    def moved(images=None, state=None, prompt=None):
        asked = model.request(
            images or case.images, case["state"] if state is None else state, prompt or str(case["prompt"]),
            case["noise"],
        )  # fmt: skip
        return np.abs(infer(model, asked)[0] - case["actions_normalized"]).max()

    swapped = dict(zip(case.images, reversed(case.images.values()), strict=True))
    one = dict(list(case.images.items())[:1])
    assert min(moved(swapped), moved(one), moved(state=case["state"] + 1), moved(prompt="stop")) > 100 * CHUNK
