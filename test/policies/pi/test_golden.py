"""Every case that openpi and LeRobot answered, in float32: tokens to the id, actions to 2e-5; and controls."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from vla_ros.policies.pi import prompt
from vla_ros.policies.pi.flow import euler_times, make_flow, sample_actions
from vla_ros.policies.pi.gemma import rotary_at
from vla_ros.policies.pi.network import PrefixInput
from vla_ros.policies.pi.processing import pad_state
from vla_ros.policies.pi.vision_tower import as_pixels

from .conftest import CASES, MODELS

ACTIONS, VELOCITY, KEYS = 2e-5, 3e-5, 5e-5
OPENPI = [(kind, number) for kind in MODELS for number in range(6)]
LEROBOT = [("pi0", number) for number in range(3)] + [("pi05", number) for number in range(8)]


def prepare(model, case):
    """The model's inputs for a case, and its noise."""
    processing, size = model.processing, model.network.architecture.action_dim
    state = processing.normalized_state(case["state"])
    tokens = processing.tokens(model.tokenizer.encode, case.text("prompt"), state)
    pixels = as_pixels(torch.from_numpy(processing.resized_images(case.images, 224)))
    inputs = PrefixInput(
        pixels[None], torch.from_numpy(tokens)[None], None, torch.from_numpy(pad_state(state, size))[None]
    )
    return inputs, torch.from_numpy(case["noise"])[None]


def distance(model, case, inputs):
    """How far the chunk is from the case's answer."""
    noise = torch.from_numpy(case["noise"])[None]
    chunk = sample_actions(model.network, model.flow, inputs, noise)[0].numpy()
    return np.abs(chunk - case["actions_normalized"]).max()


@pytest.mark.parametrize("layout", ["openpi", "lerobot"])
@pytest.mark.parametrize(("kind", "number"), OPENPI)
def test_openpis_answers(loaded, kind, number, layout):
    case = CASES[kind][number]
    model = loaded(kind, "openpi", case.text("robot"))
    if layout == "lerobot":  # the weights of the other file behind openpi's processing
        network = loaded(kind, "lerobot").network
        model = replace(model, network=network, flow=make_flow(network))
    chunk = model.infer(case.images, case["state"], case.text("prompt"), case["noise"])
    np.testing.assert_array_equal(chunk.tokens, case.tokens)
    size = model.processing.state_size
    np.testing.assert_allclose(chunk.state, case["state_normalized"][:size], rtol=0, atol=1e-9)
    np.testing.assert_allclose(chunk.normalized, case["actions_normalized"], rtol=0, atol=ACTIONS)
    np.testing.assert_allclose(chunk.actions, case["actions"], rtol=0, atol=ACTIONS)
    assert chunk.actions.shape == case["actions"].shape


@pytest.mark.parametrize(("kind", "number"), LEROBOT)
def test_lerobots_answers(loaded, kind, number):
    case = CASES[f"{kind}_lerobot"][number]
    model = replace(loaded(kind, "lerobot"), trained_delay=5)  # the tiny weights were not trained for it
    chunk = model.infer(case.images, case["state"], case.text("prompt"), case["noise"], case.rtc)
    np.testing.assert_array_equal(chunk.tokens, case.tokens)
    np.testing.assert_allclose(chunk.state, case["state_normalized"], rtol=0, atol=1e-6)
    np.testing.assert_allclose(chunk.normalized, case["actions_normalized"], rtol=0, atol=ACTIONS)
    np.testing.assert_allclose(chunk.actions, case["actions"], rtol=0, atol=ACTIONS)
    if case.text("mode") == "trained":
        np.testing.assert_array_equal(
            chunk.normalized[: case.rtc.delay, :7], case["previous"][: case.rtc.delay, :7]
        )


@pytest.mark.parametrize(("kind", "number"), OPENPI)
@torch.no_grad()
def test_images_and_velocities_on_the_way(loaded, kind, number):
    case = CASES[kind][number]
    model = loaded(kind, "openpi", case.text("robot"))
    inputs, actions = prepare(model, case)
    images = model.network.embed_images(inputs.pixels)[0].reshape(-1, 256, 64)
    present = case["image_mask"]
    np.testing.assert_allclose(images[:, ::31, ::17], case["image_probe"][present], rtol=0, atol=KEYS)

    prefix = model.network.prefill(inputs)
    for index, step in enumerate(model.flow.steps):
        velocity = model.network.velocity(actions, step, prefix)
        if index in (0, 5):
            np.testing.assert_allclose(velocity[0], case[f"velocity_{index}"], rtol=0, atol=VELOCITY)
        actions = actions - velocity / 10


@pytest.mark.parametrize("kind", MODELS)
@torch.no_grad()
def test_prefix_and_suffix_of_the_first_case(loaded, kind):
    case = CASES[kind][0]
    model = loaded(kind, "openpi")
    network = model.network
    inputs, noise = prepare(model, case)
    prompt = network.embed_prompt(inputs.tokens)[0]
    np.testing.assert_allclose(prompt[::7], case["prefix_embeddings_tail"][: len(prompt[::7])], rtol=0, atol=1e-6)

    valid = np.concatenate([np.repeat(case["image_mask"], 256), case["token_mask"]])
    kept = np.flatnonzero(valid[::7])  # of the stored rows, every seventh of all
    ours = (np.cumsum(valid) - 1)[::7][kept]
    cache = network.prefill(inputs).cache
    np.testing.assert_allclose(cache.keys[1, 0, 0][ours], case["prefix_key_1"][kept], rtol=0, atol=KEYS)
    np.testing.assert_allclose(cache.values[1, 0, 0][ours], case["prefix_value_1"][kept], rtol=0, atol=KEYS)

    suffix = network.embed_actions(noise, model.flow.steps[0])[0]
    if network.architecture.has_state_token:
        suffix = torch.cat([network.state_proj(inputs.state), suffix])
    np.testing.assert_allclose(suffix, case["suffix_0"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("number", range(6))
def test_bfloat16_is_closer_than_openpis_own(loaded, kind, number):
    case = CASES[kind][number]
    model = loaded(kind, "openpi", case.text("robot"), "bfloat16")
    chunk = model.infer(case.images, case["state"], case.text("prompt"), case["noise"])
    error = np.abs(chunk.normalized - case["actions_normalized"])
    own = np.abs(case["actions_normalized_bf16"] - case["actions_normalized"])
    assert error.mean() < own.mean()
    assert error.max() < 1.5 * own.max()


@pytest.mark.parametrize("kind", MODELS)
def test_wrong_masks_are_seen(loaded, kind):
    case = CASES[kind][0]
    model = loaded(kind, "openpi")
    inputs, _ = prepare(model, case)
    assert distance(model, case, inputs) < ACTIONS
    black = inputs.pixels.new_full((1, 1, 3, 224, 224), -1.0)
    camera = inputs._replace(pixels=torch.cat([inputs.pixels, black], dim=1))
    assert distance(model, case, camera) > 0.1, "a masked camera that is attended"
    padding = inputs._replace(tokens=torch.nn.functional.pad(inputs.tokens, (0, 20)))
    assert distance(model, case, padding) > 0.1, "padding that is attended"
    shorter = inputs._replace(lengths=torch.tensor([inputs.tokens.shape[1] - 1]))
    assert distance(model, case, shorter) > 0.1, "a token that is not"
    swapped = inputs._replace(pixels=inputs.pixels.flip(1))
    assert distance(model, case, swapped) > 0.1, "cameras in another order"


@pytest.mark.parametrize("kind", MODELS)
def test_wrong_positions_are_seen(loaded, kind, monkeypatch):
    case = CASES[kind][0]
    model = loaded(kind, "openpi")
    inputs, _ = prepare(model, case)
    network = model.network
    real = network.prefill

    def padded_positions(given):
        """The suffix behind all 256 places of the masked camera."""
        prefix = real(given)
        cosine, start = prefix.rotary[0], prefix.start + 256
        positions = torch.arange(start, start + cosine.shape[2])[None]
        return prefix._replace(rotary=rotary_at(positions, 16, cosine.dtype))

    monkeypatch.setattr(network, "prefill", padded_positions)
    assert distance(model, case, inputs) > 0.1


def test_state_bins_moved_by_one_are_seen(loaded, monkeypatch):
    case = CASES["pi05"][2]
    model = loaded("pi05", "openpi", "droid")
    bins = prompt.state_bins
    monkeypatch.setattr(prompt, "state_bins", lambda state: bins(state) + 1)
    chunk = model.infer(case.images, case["state"], case.text("prompt"), case["noise"])
    assert chunk.tokens.tolist() != case.tokens.tolist()
    assert np.abs(chunk.normalized - case["actions_normalized"]).max() > 0.01


@pytest.mark.parametrize("kind", MODELS)
def test_the_references_times_differ_where_they_say(loaded, kind):
    """Summed in float32 or multiplied: the fast sines make a visible difference of it, so each has its own."""
    assert euler_times(10, summed=True)[-1] == pytest.approx(0.09999993, abs=5e-9)
    assert euler_times(10, summed=False)[-1] == pytest.approx(0.1, abs=1e-8)
    case = CASES[kind][0]
    model = loaded(kind, "openpi")
    other = replace(model, flow=make_flow(model.network, summed=False))
    chunk = other.infer(case.images, case["state"], case.text("prompt"), case["noise"])
    assert ACTIONS < np.abs(chunk.normalized - case["actions_normalized"]).max() < 2e-4
