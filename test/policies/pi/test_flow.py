"""Sampling: padding, batches, static graphs, numbers of steps; real-time chunking beyond the golden cases."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from vla_ros.errors import ConfigError
from vla_ros.policies.pi.architecture import PI05, PUBLISHED, GemmaShape, TowerShape
from vla_ros.policies.pi.flow import Guidance, Inpainting, euler_times, make_flow, sample_actions
from vla_ros.policies.pi.loading import build_empty
from vla_ros.policies.pi.network import PiNetwork, PrefixInput
from vla_ros.policies.pi.rtc import RealTimeChunk, check_chunk, guidance_scale, prefix_weights

from .conftest import CASES, MODELS

TINY = {
    "vision": TowerShape(width=16, blocks=2, heads=2, mlp_width=24, used_blocks=2, image_size=28),
    "prefix": GemmaShape(width=16, depth=3, mlp_width=24, heads=4, head_dim=8),
    "expert": GemmaShape(width=8, depth=3, mlp_width=12, heads=4, head_dim=8),
    "vocabulary": 50,
    "horizon": 6,
}


def random_network(kind):
    torch.manual_seed(3)
    network = PiNetwork(replace(PUBLISHED[kind], **TINY)).eval().requires_grad_(False)
    for parameter in network.parameters():
        parameter.normal_(std=0.3)
    return network


def random_inputs(batch=1, tokens=5, cameras=2):
    generator = torch.Generator().manual_seed(5)
    return PrefixInput(
        torch.rand(batch, cameras, 3, 28, 28, generator=generator) * 2 - 1,
        torch.randint(3, 50, (batch, tokens), generator=generator),
        None,
        torch.randn(batch, 32, generator=generator),
    ), torch.randn(batch, 6, 32, generator=generator)


@pytest.mark.parametrize("kind", MODELS)
def test_padding_changes_nothing(kind):
    network = random_network(kind)
    flow = make_flow(network)
    inputs, noise = random_inputs()
    plain = sample_actions(network, flow, inputs, noise)
    padded = inputs._replace(
        tokens=torch.nn.functional.pad(inputs.tokens, (0, 7), value=9), lengths=torch.tensor([5])
    )
    torch.testing.assert_close(sample_actions(network, flow, padded, noise), plain, rtol=0, atol=2e-6)


@pytest.mark.parametrize("kind", MODELS)
def test_a_batch_is_its_robots_one_by_one(kind):
    network = random_network(kind)
    flow = make_flow(network)
    inputs, noise = random_inputs(batch=3, tokens=8)
    lengths = torch.tensor([8, 3, 6])
    together = sample_actions(network, flow, inputs._replace(lengths=lengths), noise)
    for robot, length in enumerate(lengths):
        one = PrefixInput(
            inputs.pixels[robot : robot + 1],
            inputs.tokens[robot : robot + 1, :length],
            None,
            inputs.state[robot : robot + 1],
        )
        alone = sample_actions(network, flow, one, noise[robot : robot + 1])
        torch.testing.assert_close(together[robot : robot + 1], alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "form"),
    [("pi0", "plain"), ("pi0", "guided"), ("pi05", "plain"), ("pi05", "guided"), ("pi05", "trained")],
)
def test_no_value_is_read_while_sampling(kind, form):
    """Shapes alone decide what is computed, as in a captured graph: it runs with tensors that have no values."""
    network = random_network(kind)
    flow = make_flow(network, steps=2)
    inputs, noise = random_inputs()
    rtc = {
        "plain": None,
        "guided": Guidance(noise, torch.rand(1, 6, 1)),
        "trained": Inpainting(noise, torch.arange(6)[None, :, None] < 2),
    }[form]
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = PrefixInput(*(mode.from_tensor(value) for value in inputs._replace(lengths=torch.tensor([4]))))
        chunk = sample_actions(network, flow, fake, mode.from_tensor(noise), rtc)
    assert chunk.shape == (1, 6, 32)
    with FakeTensorMode() as mode, pytest.raises(DataDependentOutputException):
        bool(mode.from_tensor(noise).sum() > 0)  # what the mode is for


@pytest.mark.parametrize("steps", [1, 2, 3, 5, 7, 10, 16, 50])
def test_any_number_of_steps_ends_at_the_actions(steps):
    for summed in (True, False):
        times = euler_times(steps, summed)
        assert len(times) == steps
        assert times[0] == 1.0
        assert times[-1] == pytest.approx(1 / steps, abs=1e-5)
    assert all(np.float32(time) == time for time in times)


def test_more_steps_come_closer_to_the_flows_end():
    network = random_network(PI05)
    inputs, noise = random_inputs()
    ends = {steps: sample_actions(network, make_flow(network, steps), inputs, noise) for steps in (4, 16, 256)}
    assert (ends[16] - ends[256]).abs().max() < (ends[4] - ends[256]).abs().max()


@pytest.mark.parametrize("kind", MODELS)
def test_guidance_without_weight_is_plain_sampling(kind):
    network = random_network(kind)
    flow = make_flow(network)
    inputs, noise = random_inputs()
    plain = sample_actions(network, flow, inputs, noise)
    unguided = Guidance(torch.randn(1, 6, 32), torch.zeros(1, 6, 1))
    torch.testing.assert_close(sample_actions(network, flow, inputs, noise, unguided), plain, rtol=0, atol=0)
    guided = Guidance(torch.zeros(1, 6, 32), torch.ones(1, 6, 1))
    pulled = sample_actions(network, flow, inputs, noise, guided)
    assert pulled.abs().mean() < 0.2 * plain.abs().mean(), "weight 1 pulls towards the previous chunk"


def test_no_given_action_is_plain_sampling_and_all_but_one_are_kept():
    network = random_network(PI05)
    flow = make_flow(network)
    inputs, noise = random_inputs()
    previous = torch.randn(1, 6, 32)
    nothing = Inpainting(previous, torch.zeros(1, 6, 1, dtype=torch.bool))
    plain = sample_actions(network, flow, inputs, noise)
    torch.testing.assert_close(sample_actions(network, flow, inputs, noise, nothing), plain, rtol=0, atol=1e-6)
    most = Inpainting(previous, torch.arange(6)[None, :, None] < 5)
    chunk = sample_actions(network, flow, inputs, noise, most)
    assert torch.equal(chunk[:, :5], previous[:, :5])
    assert not torch.equal(chunk[:, 5], plain[:, 5])


@pytest.mark.parametrize("number", range(1, 6))
def test_weights_are_lerobots(number):
    case = CASES["pi05_lerobot"][number]
    np.testing.assert_allclose(prefix_weights(case.rtc, 10), case["weights"], rtol=0, atol=1e-6)


def test_the_guidance_of_ten_steps():
    scales = [guidance_scale(1 - step / 10, 10.0) for step in range(10)]
    np.testing.assert_allclose(scales, [10, 9.1, 4.25, 2.8, 2.2, 2, 2.2, 2.8, 4.25, 9.1], atol=0.05)


def request(**changes):
    return RealTimeChunk(**{"previous": np.zeros((8, 7)), "delay": 2, **changes})


@pytest.mark.parametrize(
    ("rtc", "max_delay", "message"),
    [
        (request(previous=np.zeros((11, 7))), 0, r"shape \[11, 7\], expected \[1 to 10"),
        (request(previous=np.zeros((0, 7))), 0, "shape"),
        (request(previous=np.zeros((3, 33))), 0, "1 to 32"),
        (request(previous=np.full((3, 7), np.nan)), 0, "NaN"),
        (request(delay=11), 0, "delay of 11"),
        (request(delay=-1), 0, "delay of -1"),
        (request(mode="frozen"), 0, "mode 'frozen'"),
        (request(schedule="COSINE"), 0, "schedule 'COSINE'"),
        (request(mode="trained"), 0, "trained for at most 0"),
        (request(mode="trained", delay=5), 4, "expected 0 to 4"),
        (request(mode="trained", delay=3, previous=np.zeros((2, 7))), 8, "expected 0 to 2"),
    ],
)
def test_what_cannot_be_continued_is_refused(rtc, max_delay, message):
    with pytest.raises(ConfigError, match=message):
        check_chunk(rtc, horizon=10, action_dim=32, max_delay=max_delay)


def test_what_can_be_continued():
    check_chunk(request(), 10, 32, 0)
    check_chunk(request(mode="trained", delay=4), 10, 32, 4)


@pytest.mark.parametrize("kind", MODELS)
def test_the_published_shape_runs_through(kind):
    network = build_empty(PUBLISHED[kind])
    inputs = PrefixInput(
        torch.empty(1, 3, 3, 224, 224, device="meta"),
        torch.empty(1, 60, dtype=torch.long, device="meta"),
        None,
        torch.empty(1, 32, device="meta"),
    )
    prefix = network.prefill(inputs)
    places = 3 * 256 + 60 + (kind == "pi0")
    assert prefix.start == places
    assert prefix.cache.keys.shape == (18, 1, 1, places + 50, 256)
    flow = make_flow(network, steps=1)
    chunk = sample_actions(network, flow, inputs, torch.empty(1, 50, 32, device="meta"))
    assert chunk.shape == (1, 50, 32)
