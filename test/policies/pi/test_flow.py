from dataclasses import replace

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from vla_ros.errors import ConfigError
from vla_ros_models.engine.device_errors import NotFiniteError
from vla_ros_models.engine.flow import prefill_flow, sample
from vla_ros_models.engine.flow_engine import Continuation, FlowEngine, FlowRequest
from vla_ros_models.engine.guidance import guidance_scale
from vla_ros_models.engine.kernel_check import checked
from vla_ros_models.engine.ops import Ops
from vla_ros_models.engine.shapes import TowerShape
from vla_ros_models.engine.stream import Guide, KVCache
from vla_ros_models.flow_policy import RealTimeChunk, prefix_weights
from vla_ros_models.pi.architecture import PI05, PUBLISHED, gemma
from vla_ros_models.pi.network import PiNetwork, build_empty, euler_times, make_flow

from .conftest import CASES, MODELS

TINY = {
    "vision": TowerShape(width=16, blocks=2, heads=2, mlp_width=24, used_blocks=2, image_size=28),
    "prefix": gemma(16, 3, 24, heads=4, head_dim=8),
    "expert": gemma(8, 3, 12, heads=4, head_dim=8),
    "vocabulary": 50,
    "horizon": 6,
}


def random_engine(kind, steps=10, **options):
    torch.manual_seed(3)
    network = PiNetwork(replace(PUBLISHED[kind], **TINY)).eval().requires_grad_(False)
    for parameter in network.parameters():
        parameter.normal_(std=0.3)
    return FlowEngine(make_flow(network, steps), (28, 28), 200, Ops(), torch.float32, **options)


def random_request(tokens=5, cameras=2, seed=5, **changes):
    draw = np.random.default_rng(seed)
    state = draw.normal(size=32)
    return FlowRequest(
        images=list(draw.random((cameras, 28, 28, 3), np.float32)),
        tokens=draw.integers(3, 50, tokens),
        make_state=lambda: state,
        noise=draw.normal(size=(6, 32)),
        **changes,
    )


def answer(engine, *requests):
    return [one.actions for one in engine.answer(requests)]


@pytest.mark.parametrize("kind", MODELS)
def test_padding_does_not_change_the_chunk(kind):
    engine, request = random_engine(kind), random_request()
    engine.warm_up([5, 60], cameras=2)
    short = answer(engine, request)[0]
    longer = random_engine(kind)
    longer.warm_up([60], cameras=2)
    longer.buckets = replace(longer.buckets, lengths=longer.buckets.lengths[1:])
    np.testing.assert_allclose(answer(longer, request)[0], short, rtol=0, atol=2e-6)


@pytest.mark.parametrize("kind", MODELS)
def test_earlier_requests_do_not_change_the_chunk(kind):
    engine, request = random_engine(kind), random_request(tokens=3)
    fresh = answer(engine, request)[0]
    answer(engine, random_request(tokens=30, seed=9, continuation=Continuation(np.full((6, 32), 5.0), np.ones(6))))
    np.testing.assert_array_equal(answer(engine, request)[0], fresh)
    [failed] = engine.answer([replace(random_request(tokens=30), noise=np.full((6, 32), np.nan))])
    assert isinstance(failed, NotFiniteError)
    np.testing.assert_array_equal(answer(engine, request)[0], fresh)


@pytest.mark.parametrize("kind", MODELS)
def test_a_batch_equals_single_requests(kind):
    engine = random_engine(kind)
    requests = [random_request(tokens=tokens, seed=tokens) for tokens in (8, 3, 6)]
    requests[1] = replace(requests[1], continuation=Continuation(np.ones((6, 32)), np.linspace(1, 0, 6)))
    for together, request in zip(answer(engine, *requests), requests, strict=True):
        np.testing.assert_allclose(together, answer(engine, request)[0], rtol=0, atol=1e-5)


def test_more_images_than_positions_are_refused():
    with pytest.raises(ConfigError, match="found, but the model has positions for only"):
        answer(random_engine(PI05), random_request(cameras=80))


@pytest.mark.parametrize("kind", MODELS)
def test_sampling_reads_no_values_on_the_host(kind):
    """Shapes alone decide what is computed, as in a captured graph: it runs with tensors that have no values."""
    model, ops = random_engine(kind, steps=2).model, Ops()
    given = torch.arange(6)[None].int()
    values = {
        "patches": torch.rand(1, 8, 16), "tokens": torch.randint(3, 50, (1, 9)), "noise": torch.randn(1, 6, 32),
        "state": torch.randn(1, 32), "lengths": torch.tensor([4], dtype=torch.int32),
    }  # fmt: skip
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = {name: mode.from_tensor(value) for name, value in values.items()}
        cache = KVCache.in_blocks(model.prefix, 1, 24)
        prefill_flow(model, ops, cache, fake["patches"], fake["tokens"], fake["lengths"])
        guide = Guide(fake["noise"], torch.rand(1, 6), torch.ones(1), mode.from_tensor(given))
        chunk = sample(model, ops, cache, fake["lengths"] + 8, fake["noise"], fake["state"], guide)
    assert chunk.shape == (1, 6, 32)
    with FakeTensorMode() as mode, pytest.raises(DataDependentOutputException):
        bool(mode.from_tensor(values["noise"]).sum() > 0)  # what the mode is for


@pytest.mark.parametrize("steps", [1, 2, 3, 5, 7, 10, 16, 50])
def test_euler_times_for_any_number_of_steps(steps):
    for summed in (True, False):
        times = euler_times(steps, summed)
        assert len(times) == steps
        assert times[0] == 1.0
        assert times[-1] == pytest.approx(1 / steps, abs=1e-5)
    assert all(np.float32(time) == time for time in times)


def test_more_steps_converge():
    ends = {steps: answer(random_engine(PI05, steps), random_request())[0] for steps in (4, 16, 256)}
    assert np.abs(ends[16] - ends[256]).max() < np.abs(ends[4] - ends[256]).max()


@pytest.mark.parametrize("kind", MODELS)
def test_guidance_without_weight_is_plain_sampling(kind):
    engine, request = random_engine(kind), random_request()
    plain = answer(engine, request)[0]
    unguided = Continuation(np.ones((6, 32)), np.zeros(6))
    np.testing.assert_array_equal(answer(engine, replace(request, continuation=unguided))[0], plain)
    guided = Continuation(np.zeros((6, 32)), np.ones(6))
    pulled = answer(engine, replace(request, continuation=guided))[0]
    assert np.abs(pulled).mean() < 0.2 * np.abs(plain).mean(), "weight 1 pulls towards the previous chunk"


@pytest.mark.parametrize("kind", MODELS)
def test_jacobian_guidance_follows_the_gradient(kind):
    """One step of the flow from t = 1: what guidance adds, against the change of the free chunk with its noise."""
    free, guided = random_engine(kind, 1), random_engine(kind, 1, jacobian=True)
    request, draw = random_request(), np.random.default_rng(2)
    previous, weights = draw.normal(size=(6, 32)), np.array([1.0, 1.0, 0.5, 0.2, 0.0, 0.0])
    follow = replace(request, continuation=Continuation(previous, weights, limit=0.5))
    plain = answer(free, request)[0].astype(np.float64)
    np.testing.assert_allclose(answer(guided, request)[0], plain, rtol=0, atol=1e-5)
    pull = (answer(guided, follow)[0] - plain) / 0.5
    error = weights[:, None] * (previous - plain)
    for way in (pull, error, draw.normal(size=(6, 32))):
        noises = [request.noise + sign * 2e-3 * way for sign in (1, -1)]
        ends = [answer(free, replace(request, noise=noise))[0].astype(np.float64) for noise in noises]
        slope = float((error * (ends[0] - ends[1])).sum() / 4e-3)
        tolerance = 0.01 * float(np.linalg.norm(pull) * np.linalg.norm(way))
        assert float((pull * way).sum()) == pytest.approx(slope, abs=tolerance)
    assert np.linalg.norm(pull - error) > 0.1 * np.linalg.norm(pull), "the error itself is another pull"


def test_given_actions_are_kept():
    engine, request = random_engine(PI05), random_request()
    previous = np.random.default_rng(1).normal(size=(6, 32)).astype(np.float32)
    most = replace(request, continuation=Continuation(previous, np.zeros(6), given=5))
    chunk, plain = answer(engine, most)[0], answer(engine, request)[0]
    np.testing.assert_array_equal(chunk[:5], previous[:5])
    assert not np.array_equal(chunk[5], plain[5])


class HalfGate(Ops):
    """Kernels that are wrong in one place."""

    def gate_up(self, weights, index, stream, positions):
        adaptive = weights.norms[0].shape[1] == 3
        return super().gate_up(weights, index, stream, positions) * (0.5 if adaptive else 1.0)


def test_wrong_kernels_are_replaced_by_torch(caplog):
    model, right = random_engine(PI05).model, type("Right", (Ops,), {})()
    assert checked(right, model) is right
    assert not caplog.records
    assert type(checked(HalfGate(), model)) is Ops
    assert "hidden states of a flow step (dense weights, 6 rows) differs from torch" in caplog.text


@pytest.mark.parametrize("number", range(1, 6))
def test_guidance_weights_equal_lerobots(number):
    case = CASES["pi05_lerobot"][number]
    np.testing.assert_allclose(prefix_weights(case.rtc, 10), case["weights"], rtol=0, atol=1e-6)


def test_guidance_scales_of_ten_steps():
    scales = [min(10.0, guidance_scale(1 - step / 10)) for step in range(10)]
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
        (request(mode="trained"), 0, "trained for at most 0"),
        (request(mode="trained", delay=5), 4, "expected 0 to 4"),
        (request(mode="trained", delay=3, previous=np.zeros((2, 7))), 8, "expected 0 to 2"),
    ],
)
def test_invalid_previous_chunks_are_refused(rtc, max_delay, message):
    with pytest.raises(ConfigError, match=message):
        rtc.continuation(10, 32, max_delay)


@pytest.mark.parametrize("kind", MODELS)
def test_the_published_sizes_run_on_meta(kind):
    model = make_flow(build_empty(PUBLISHED[kind]), steps=1)

    def empty(*shape, dtype=torch.float32):
        return torch.empty(shape, dtype=dtype, device="meta")

    patches = model.encode(empty(3, 224, 224, 3, dtype=torch.uint8)).flatten(0, 1)[None]
    assert patches.shape == (1, 768, 2048)
    cache = KVCache.in_blocks(model.prefix, 1, 768 + 64 + model.suffix)
    assert [len(cache.keys), *cache.keys[0].shape] == [18, 1, 1, 896, 256]
    lengths = empty(1, dtype=torch.int32)
    prefill_flow(model, Ops(), cache, patches, empty(1, 64, dtype=torch.int64), lengths)
    guide = Guide(empty(1, 50, 32), empty(1, 50), empty(1), empty(1, 50, dtype=torch.int32))
    chunk = sample(model, Ops(), cache, lengths + 768, empty(1, 50, 32), empty(1, 32), guide)
    assert chunk.shape == (1, 50, 32)
