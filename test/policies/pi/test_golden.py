from dataclasses import replace

import numpy as np
import pytest
import torch

from vla_ros_models.engine.flow import prefill_flow, run_step, suffix_rows
from vla_ros_models.engine.guidance import predict_velocity
from vla_ros_models.engine.ops import Ops
from vla_ros_models.engine.stream import KVCache
from vla_ros_models.pi import processing
from vla_ros_models.pi.inference import make_engine
from vla_ros_models.pi.network import euler_times

from .conftest import CASES, MODELS, infer

ACTIONS, VELOCITY, KEYS = 2e-5, 3e-5, 5e-5
OPENPI = [(kind, number) for kind in MODELS for number in range(6)]
LEROBOT = [("pi0", number) for number in range(3)] + [("pi05", number) for number in range(8)]


def prepare(model, case):
    """The engine's request for a case."""
    return model.request(case.images, case["state"], case.text("prompt"), case["noise"], case.rtc)


def distance(model, case, request):
    return np.abs(model.engine.answer([request])[0].actions - case["actions_normalized"]).max()


def run_prefix(flow, request):
    """A filled cache, the prefix's length and the image tokens."""
    patches = flow.encode(torch.from_numpy(np.stack(request.images))).flatten(0, 1)[None]
    cache = KVCache.in_blocks(flow.prefix, 1, 1024)
    length = torch.tensor([len(request.tokens)], dtype=torch.int32)
    prefill_flow(flow, Ops(), cache, patches, torch.from_numpy(request.tokens)[None], length)
    return cache, patches.shape[1] + length, patches


@pytest.mark.parametrize(("kind", "number"), OPENPI)
def test_chunks_equal_openpis(loaded, kind, number):
    case = CASES[kind][number]
    model = loaded(kind, "openpi", case.text("robot"))
    chunk = infer(model, case.images, case["state"], case.text("prompt"), case["noise"])
    np.testing.assert_array_equal(chunk.tokens, case.tokens)
    size = model.processing.state_size
    np.testing.assert_allclose(chunk.state, case["state_normalized"][:size], rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(chunk.normalized, case["actions_normalized"], rtol=0, atol=ACTIONS)
    np.testing.assert_allclose(chunk.actions, case["actions"], rtol=0, atol=ACTIONS)
    assert chunk.actions.shape == case["actions"].shape


@pytest.mark.parametrize(("kind", "number"), LEROBOT)
def test_chunks_equal_lerobots(loaded, kind, number):
    case = CASES[f"{kind}_lerobot"][number]
    model = replace(loaded(kind, "lerobot"), trained_delay=5)  # the tiny weights were not trained for it
    chunk = infer(model, case.images, case["state"], case.text("prompt"), case["noise"], case.rtc)
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
def test_image_tokens_and_velocities_equal_openpis(loaded, kind, number):
    case = CASES[kind][number]
    model = loaded(kind, "openpi", case.text("robot"))
    flow, request = model.engine.model, prepare(model, case)
    cache, start, patches = run_prefix(flow, request)
    present = case["image_mask"]
    tokens = patches[0].unflatten(0, (-1, 256))
    np.testing.assert_allclose(tokens[:, ::31, ::17], case["image_probe"][present], rtol=0, atol=KEYS)

    actions, state = (torch.from_numpy(np.float32(value))[None] for value in (request.noise, request.make_state()))
    for step, rows in enumerate(suffix_rows(flow, Ops(), cache, start, torch.zeros(1, 10, dtype=torch.int32))):
        stream = run_step(flow, Ops(), cache, actions, state, rows, step)
        velocity = predict_velocity(Ops().norm(flow.expert, stream, rows), flow.action_out, flow.horizon)
        if step in (0, 5):
            np.testing.assert_allclose(velocity[0], case[f"velocity_{step}"], rtol=0, atol=VELOCITY)
        actions = actions - velocity / 10


@pytest.mark.parametrize("kind", MODELS)
@torch.no_grad()
def test_prefix_keys_and_suffix_equal_openpis(loaded, kind, monkeypatch):
    case = CASES[kind][0]
    model = loaded(kind, "openpi")
    flow, request = model.engine.model, prepare(model, case)
    cache, start, _ = run_prefix(flow, request)
    valid = np.concatenate([np.repeat(case["image_mask"], 256), case["token_mask"]])
    kept = np.flatnonzero(valid[::7])  # of the stored rows, every seventh of all
    ours = (np.cumsum(valid) - 1)[::7][kept]
    np.testing.assert_allclose(cache.keys[1][0, 0][ours], case["prefix_key_1"][kept], rtol=0, atol=KEYS)
    np.testing.assert_allclose(cache.values[1][0, 0][ours], case["prefix_value_1"][kept], rtol=0, atol=KEYS)

    begun = []
    monkeypatch.setattr(Ops, "start", lambda *given: begun.append(given[2]))
    monkeypatch.setattr("vla_ros_models.engine.flow.run_layers", lambda *given, **named: None)
    noise, state = (torch.from_numpy(np.float32(value))[None] for value in (request.noise, request.make_state()))
    [rows, *_] = suffix_rows(flow, Ops(), cache, start, torch.zeros(1, 10, dtype=torch.int32))
    run_step(flow, Ops(), cache, noise, state, rows, 0)
    np.testing.assert_allclose(begun[0][0], case["suffix_0"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("number", range(6))
def test_bfloat16_is_closer_than_openpis_own(loaded, kind, number):
    case = CASES[kind][number]
    model = loaded(kind, "openpi", case.text("robot"), "bfloat16")
    chunk = infer(model, case.images, case["state"], case.text("prompt"), case["noise"])
    error = np.abs(chunk.normalized - case["actions_normalized"])
    own = np.abs(case["actions_normalized_bf16"] - case["actions_normalized"])
    assert error.mean() < own.mean()
    assert error.max() < 1.5 * own.max()


@pytest.mark.parametrize("kind", MODELS)
def test_wrong_masks_change_the_chunk(loaded, kind):
    case = CASES[kind][0]
    model = loaded(kind, "openpi")
    request = prepare(model, case)
    assert distance(model, case, request) < ACTIONS
    images, tokens = list(request.images), request.tokens
    controls = {
        "a masked camera that is attended": {"images": [*images, np.zeros_like(images[0])]},
        "padding that is attended": {"tokens": np.pad(tokens, (0, 20))},
        "a token that is not": {"tokens": tokens[:-1]},
        "cameras in another order": {"images": images[::-1]},
    }
    for what, changes in controls.items():
        assert distance(model, case, replace(request, **changes)) > 0.1, what


@pytest.mark.parametrize("kind", MODELS)
def test_wrong_positions_change_the_chunk(loaded, networks, kind):
    """The suffix behind all 256 places of the masked camera."""
    case = CASES[kind][0]
    model = loaded(kind, "openpi")
    engine = make_engine(networks(kind, "openpi"), model.processing, 10)
    expert = engine.model.expert
    engine.model = replace(engine.model, expert=replace(expert, cosine=expert.cosine[256:], sine=expert.sine[256:]))
    assert distance(replace(model, engine=engine), case, prepare(model, case)) > 0.1


def test_shifted_state_bins_change_the_chunk(loaded, monkeypatch):
    case = CASES["pi05"][2]
    model = loaded("pi05", "openpi", "droid")
    bins = processing.state_bins
    monkeypatch.setattr(processing, "state_bins", lambda state: bins(state) + 1)
    chunk = infer(model, case.images, case["state"], case.text("prompt"), case["noise"])
    assert chunk.tokens.tolist() != case.tokens.tolist()
    assert np.abs(chunk.normalized - case["actions_normalized"]).max() > 0.01


@pytest.mark.parametrize("kind", MODELS)
def test_summed_and_multiplied_times_differ(loaded, networks, kind):
    """Summed in float32 or multiplied: the fast sines make a visible difference of it, so each has its own."""
    assert euler_times(10, summed=True)[-1] == pytest.approx(0.09999993, abs=5e-9)
    assert euler_times(10, summed=False)[-1] == pytest.approx(0.1, abs=1e-8)
    case = CASES[kind][0]
    model = loaded(kind, "openpi")
    processing = replace(model.processing, summed_times=False)
    other = replace(model, engine=make_engine(networks(kind, "openpi"), processing, 10))
    chunk = infer(other, case.images, case["state"], case.text("prompt"), case["noise"])
    assert ACTIONS < np.abs(chunk.normalized - case["actions_normalized"]).max() < 2e-4
