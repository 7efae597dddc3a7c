"""Compares with lerobot 0.6.1: tokens, positions and images are equal, actions within 1e-4 normalised."""

import numpy as np
import pytest

from test.policies.groot.conftest import CASES, VARIANTS, infer, load_cases, request


def model_of(loaded, case):
    return loaded(VARIANTS[case.variant][0], **case.options)


@pytest.mark.parametrize("case", CASES)
def test_chunk(loaded, case):
    model = model_of(loaded, case)
    processing = model.processing
    for index, key in enumerate(processing.images):
        resized = processing.resize.prepare(case.images[key])
        np.testing.assert_array_equal(resized[::5, ::7], case[f"resized_{index}_probe"])
    asked = request(model, case)
    np.testing.assert_array_equal(asked.tokens, case["tokens"][case.valid])
    np.testing.assert_array_equal(asked.positions, case["position_ids"][:, case.valid])
    np.testing.assert_allclose(asked.make_state(), case["state_normalized"], atol=1e-6)
    again = request(model, case, noise=0)
    assert again.tokens is asked.tokens  # an instruction is encoded once
    [chunk] = infer(model, asked)
    np.testing.assert_allclose(chunk[:, : processing.model_size], case["actions_normalized"], atol=1e-4)
    np.testing.assert_allclose(processing.robot_actions(chunk, case["state"]), case["actions"], atol=2e-4)


@pytest.mark.parametrize("variant", ["two_libero", "plain"])
def test_batch_equals_single_requests(loaded, variant):
    """Requests of different lengths, in one batch; plain's images have different sizes, so they run alone."""
    cases = load_cases(variant)[:3]
    model = model_of(loaded, cases[0])
    requests = [request(model, case) for case in cases]
    alike = [one for one in requests if one.grids == requests[0].grids]
    assert len(alike) == (3 if variant == "two_libero" else 1)
    for chunk, case in zip(infer(model, *alike), cases, strict=False):
        np.testing.assert_allclose(chunk[:, : model.processing.model_size], case["actions_normalized"], atol=1e-4)
