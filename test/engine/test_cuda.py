"""The engine on a GPU: graphs, streams, background captures."""

import threading

import numpy as np
import pytest
import torch

from benchmarks.models.subject import open_subject
from vla_ros.errors import VlaRosError
from vla_ros.types import RawImage
from vla_ros.vision.preprocess import process
from vla_ros.vision.processors import ResizeNaive
from vla_ros_models.engine.device_ops import make_ops
from vla_ros_models.engine.drafts import DraftState
from vla_ros_models.engine.kernel_check import check_products
from vla_ros_models.engine.runner import CudaRunner, TransferBuffer
from vla_ros_models.engine.token_engine import EngineRequest
from vla_ros_models.engine.weights import fuse
from vla_ros_models.openvla.inference import check_resizing, make_engine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; torch sees none here"),
]


@pytest.fixture(scope="module")
def subject():
    return open_subject("tiny", torch.device("cuda:0"), torch.float32)


def ask(engine, images, prompts, drafts=None):
    drafts = [
        DraftState() if draft is None else DraftState(tuple(draft)) for draft in drafts or [None] * len(prompts)
    ]
    return engine.answer([EngineRequest(*one) for one in zip(images, prompts, drafts, strict=True)])


def case(rng, length):
    image = rng.integers(0, 256, (1, 224, 224, 3), dtype=np.uint8)
    return image, np.array([1, *rng.integers(3, 400, length - 2), 29871], dtype=np.int64)


@torch.inference_mode()
def reference(model, image, prompt):
    patches = model.embed_image(model.normalize(torch.from_numpy(image).cuda()))
    logits, cache = model.prefill(patches, torch.from_numpy(prompt)[None].cuda(), room=7)
    return model.greedy(logits, cache, 7).tokens[0].cpu().numpy()


@pytest.mark.parametrize("drafts", ["none", "verify", "prefill"])
def test_graphs_give_the_reference_tokens(subject, drafts):
    rng, engine, previous = np.random.default_rng(1), make_engine(subject.model, 7, drafts=drafts), None
    engine.warm_up([20])
    for step in range(40):
        image, prompt = case(rng, 8 + step)
        expected = reference(subject.model, image, prompt)
        draft = expected if step % 2 else previous
        answer = ask(engine, image, [prompt], [draft])[0]
        assert np.array_equal(answer.tokens, expected)
        previous = expected
    assert engine._of(1).wait(60)
    assert engine.failures() == {}
    assert len(engine._of(1).ready) > 1  # captured behind the scenes
    engine.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["none", "int8", "int4", "fp8"])
def test_a_draft_that_is_verified_has_the_bits_of_plain_decoding(kind, dtype):
    model, rng = open_subject("tiny", torch.device("cuda:0"), dtype).model, np.random.default_rng(2)
    plain, *others = (make_engine(model, 7, kind, drafts) for drafts in ("none", "verify", "prefill"))
    for engine in others:
        engine.guard = np.inf
    for number in range(12):
        image, prompt = case(rng, 20 + number % 2)
        expected = ask(plain, image, [prompt])[0]
        for engine in others:
            draft = expected.tokens.copy()
            draft[number % 7 :] += number % 3
            found = ask(engine, image, [prompt], [draft])[0]
            assert np.array_equal(found.tokens, expected.tokens)
            assert np.array_equal(found.margins, expected.margins)
            assert found.passes == 1 or number % 3


@pytest.mark.parametrize("kind", ["none", "int8", "int4", "fp8"])
def test_kernels_of_quantised_weights_multiply_as_torch_does(kind):
    model = open_subject("tiny", torch.device("cuda:0"), torch.bfloat16).model
    weights = fuse(model.language_model, kind)
    check_products(make_ops(weights.device), weights)


def test_no_growth_over_many_steps(subject):
    rng, engine = np.random.default_rng(3), make_engine(subject.model, 7)
    image, prompt = case(rng, 20)
    engine.warm_up([20])
    for _ in range(20):
        ask(engine, image, [prompt])
    before = torch.cuda.memory_allocated()
    for _ in range(300):
        ask(engine, image, [prompt])
    assert torch.cuda.memory_allocated() == before


def test_nan_is_an_error(subject):
    engine = make_engine(subject.model, 7)
    image, prompt = case(np.random.default_rng(4), 20)
    ask(engine, image, [prompt])
    assert engine.wait(60)  # a capture that is waited for by the whole device breaks
    weight = engine.weights.lm_head.data
    kept = weight[5].clone()
    weight[5] = float("nan")
    torch.cuda.synchronize()  # written on another stream than the engine's
    with pytest.raises(VlaRosError, match="NaN or Inf"):
        ask(engine, image, [prompt])
    weight[5] = kept
    torch.cuda.synchronize()
    ask(engine, image, [prompt])


def test_the_device_reads_page_locked_memory_by_itself():
    runner, rng = CudaRunner(torch.device("cuda:0")), np.random.default_rng(5)
    memory, target = runner.page_locked(1_000_100), torch.zeros(500, 500, 4, dtype=torch.uint8, device="cuda:0")
    for start in (0, 61):  # pixels begin anywhere in a message
        image = memory[start : start + 1_000_000].reshape(500, 500, 4)
        image[...] = rng.integers(0, 256, image.shape, dtype=np.uint8)
        with runner.stream():
            runner.upload(target, image)
            runner.wait()
        assert np.array_equal(target.cpu().numpy(), image)
    assert not runner._pinned, "it was copied to another buffer first"


def test_captured_transfers_take_what_the_host_wrote_last():
    runner = CudaRunner(torch.device("cuda:0"))
    packed = TransferBuffer(runner.device, ((3, 5), torch.int64), ((7,), torch.float32))

    def stage():
        packed.load()
        for tensor in packed.tensors:
            tensor.add_(1)
        packed.store()

    run = runner.capture(stage)
    for number in range(20):
        for array in packed.cleared():
            array[...] = number
        with runner.stream():
            run()
            runner.wait()
        assert all((array == number + 1).all() for array in packed.arrays)


def test_captures_beside_replays_do_not_disturb_them():
    """Forty lengths of products, captured by a second thread on two streams while the first thread replays."""
    device = torch.device("cuda:0")
    runner, streams, wrong = CudaRunner(device), set(), []
    weight = torch.randn(2048, 2048, device=device)

    def product(rows):
        left, out = torch.randn(rows, 2048, device=device), torch.empty(rows, 2048, device=device)

        def stage():
            streams.add(torch.cuda.current_stream(device).cuda_stream)
            torch.mm(left, weight, out=out)

        return left, out, stage

    def check(replay, left, out):
        out.zero_()
        replay()
        found = runner.download(out)
        if not np.allclose(found, (left.double() @ weight.double()).cpu().numpy(), atol=0.05):
            wrong.append(left.shape[0])

    cases = [product(rows) for rows in range(8, 328, 8)]
    torch.cuda.synchronize()
    ready = [(runner.capture(cases[0][2]), *cases[0][:2])]

    def work():
        for left, out, stage in cases[1:]:
            ready.append((runner.capture(stage), left, out))

    thread = threading.Thread(target=work)
    thread.start()
    with runner.stream():
        while thread.is_alive():
            check(*ready[-1])
        for one in ready:
            check(*one)
    assert len(ready) == len(cases)
    assert wrong == []
    assert len(streams) == 2


@pytest.mark.parametrize("size", [(480, 640), (720, 1280), (1080, 1920), (224, 224)])
def test_frames_are_resized_to_the_bits_of_the_host(subject, size):
    engine = make_engine(subject.model, 7)
    for orientation in ("none", "rotate_90", "rotate_180"):
        pixels = np.random.default_rng(5).integers(0, 256, (*size, 3), dtype=np.uint8)
        check_resizing(engine, RawImage(pixels, orientation, ResizeNaive()))


def test_frames_that_change_their_size_keep_the_bits_of_the_host(subject):
    """While graphs of their sizes are captured, used and freed behind the scenes; memory must not grow."""
    rng, engine, sizes = np.random.default_rng(6), make_engine(subject.model, 7), []
    reserved = []
    for number in range(60):
        if number % 3 == 0:
            sizes = [(int(height), int(width)) for height, width in rng.integers(230, 900, (2, 2))]
        for size in (*sizes, (480, 640)):
            frame = RawImage(rng.integers(0, 256, (*size, 3), dtype=np.uint8), processor=ResizeNaive())
            assert np.array_equal(engine.resized(frame), process(frame)), size
        if number >= 20:
            assert engine.wait(60)
            reserved.append(torch.cuda.memory_reserved())
    assert reserved[-1] <= reserved[0] + 256 * 2**20
    engine.close()


def test_preparing_a_frame_takes_one_launch_once_its_graph_is_there(subject):
    rng, engine = np.random.default_rng(7), make_engine(subject.model, 7)
    _, prompt = case(rng, 20)
    engine.warm_up([20])
    frame = RawImage(rng.integers(0, 256, (720, 1280, 3), dtype=np.uint8), processor=ResizeNaive())
    first = ask(engine, [frame], [prompt])[0]
    assert engine.wait(60)
    later = [ask(engine, [frame], [prompt])[0] for _ in range(20)]
    assert all(np.array_equal(one.margins, first.margins) for one in later)
    took = [one.stages_ms["preprocess"] for one in later]
    print("preprocess", sorted(took)[10], "upload", sorted(one.stages_ms["upload"] for one in later)[10])
    engine.close()
