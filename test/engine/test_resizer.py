"""Camera frames that the engine resizes: the same bits and the same actions as resizing on the host."""

import gc
import threading
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch

from vla_ros.config import build
from vla_ros.config.sections import ORIENTATIONS
from vla_ros.control.inputs import Snapshot
from vla_ros.errors import ConfigError, ImageError
from vla_ros.execution.source import PolicySource
from vla_ros.node.inference import first_step
from vla_ros.node.pipeline import build_pipeline
from vla_ros.types import JointState, RawImage
from vla_ros.vision.messages import encode_image
from vla_ros.vision.preprocess import LazyImages, process
from vla_ros.vision.processors import LiberoResize, ResizeNaive
from vla_ros_models.engine.device_errors import EngineMismatchError
from vla_ros_models.engine.resizer import ImageResizer
from vla_ros_models.engine.runner import Runner
from vla_ros_models.openvla.inference import check_resizing
from vla_ros_models.openvla.policy import OpenVLAPolicy

CPU = torch.device("cpu")
JOINTS = JointState(
    tuple(f"joint_{number}" for number in range(1, 8)), np.array([0.0, 0.4, 0.0, 1.8, 0.0, 0.9, 0.0]), 10
)

SMALL = ResizeNaive((28, 28))


def noise(height, width, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


class Accounting(Runner):
    """Records which buffers were freed."""

    def __init__(self):
        self.forgotten = []

    def forget(self, target):
        self.forgotten.append(tuple(target.shape[:2]))


class Capturing(Runner):
    """A runner that keeps account of captures, as if there were graphs; they wait until they may."""

    graphs = True

    def __init__(self, allowed=True):
        self.allowed = threading.Event()
        if allowed:
            self.allowed.set()
        self.graphs_made = []

    def capture(self, stage):
        assert self.allowed.wait(30)
        for _ in range(3):
            stage()

        class Graph:
            replays = 0

            def replay(self):
                self.replays += 1
                stage()

        graph = Graph()
        self.graphs_made.append(weakref.ref(graph))
        return graph.replay


def resized(resizer, *frames, size=(28, 28)):
    target = torch.zeros((len(frames), *size, 3), dtype=torch.uint8)
    resizer.resize(resizer.upload(frames), target)
    return target.numpy()


@pytest.mark.parametrize("area", [1.0, 0.9])
@pytest.mark.parametrize("orientation", ORIENTATIONS)
def test_resized_frames_equal_those_of_the_host(orientation, area):
    resizer = ImageResizer((28, 30), CPU, Runner())
    pixels = noise(61, 93)
    pixels.flags.writeable = False  # as a view of a message is
    frame = RawImage(pixels, orientation, ResizeNaive((28, 30), area))
    assert np.array_equal(resized(resizer, frame, size=(28, 30))[0], process(frame))


def test_the_start_also_checks_the_captured_resize(tiny):
    class Wrong(Capturing):
        def capture(self, stage):
            return lambda: None  # its image stays black

    engine = tiny.engine(runner=Wrong())
    with pytest.raises(EngineMismatchError, match="64x48 differently from the host"):
        check_resizing(engine, RawImage(noise(48, 64), processor=SMALL))
    right = Capturing()
    engine = tiny.engine(runner=right)
    check_resizing(engine, RawImage(noise(48, 64), processor=SMALL))
    assert right.graphs_made[0]().replays in (1, 2)  # 2: captured before the frame was resized for the first time
    engine.close()


def test_a_camera_may_change_its_resolution_and_two_of_a_batch_do_not_share_a_buffer():
    resizer = ImageResizer((28, 28), CPU, Runner())
    batches = ((60, 80), (60, 80)), ((90, 100), (60, 80)), ((60, 80), (28, 28))
    for seed, sizes in enumerate(batches):
        frames = [RawImage(noise(*size, 10 * seed + row), processor=SMALL) for row, size in enumerate(sizes)]
        for found, frame in zip(resized(resizer, *frames), frames, strict=True):
            assert np.array_equal(found, process(frame))


def test_the_least_recently_used_buffers_are_freed():
    runner = Accounting()
    resizer = ImageResizer((28, 28), CPU, runner)
    for height in (*range(40, 48), 40, 50, 51):
        resized(resizer, RawImage(noise(height, 60), processor=SMALL))
    assert runner.forgotten == [(41, 60), (42, 60)]
    frames = [RawImage(noise(60 + row, 60), processor=SMALL) for row in range(12)]
    assert len(resized(resizer, *frames)) == 12
    resizer.clear()
    assert len(runner.forgotten) == 10 + 12


def test_frames_are_resized_without_a_graph_until_it_is_captured():
    runner = Capturing(allowed=False)
    resizer = ImageResizer((28, 28), CPU, runner)
    for step in range(6):
        if step == 3:
            assert not resizer.wait(0)
            runner.allowed.set()
            assert resizer.wait(30)
        frame = RawImage(noise(60, 80, step), "rotate_90", SMALL)
        assert np.array_equal(resized(resizer, frame)[0], process(frame))
    (graph,) = runner.graphs_made
    assert graph().replays == 3  # of the frames after it was made
    resizer.clear()
    gc.collect()
    assert graph() is None


def test_the_tables_that_a_graph_reads_live_as_long_as_the_graph(monkeypatch):
    """A CUDA graph knows addresses, not Python's objects."""
    runner, made = Capturing(), []
    monkeypatch.setattr(runner, "capture", lambda stage: stage() or (lambda: None))

    def make(*words):
        made.append(weakref.ref(pipeline := lambda images: images[:, :28, :28]))
        return pipeline

    monkeypatch.setattr("vla_ros_models.engine.resizer.make_pipeline", make)
    resizer = ImageResizer((28, 28), CPU, runner)
    resized(resizer, RawImage(noise(60, 80), processor=SMALL))
    assert resizer.wait(30)
    gc.collect()
    assert made[0]() is not None
    resizer.clear()
    gc.collect()
    assert made[0]() is None


def test_graphs_of_old_sizes_are_freed():
    runner = Capturing()
    resizer = ImageResizer((28, 28), CPU, runner)
    for height in range(40, 60):
        frame = RawImage(noise(height, 60, height), processor=SMALL)
        for _ in range(2):
            assert np.array_equal(resized(resizer, frame)[0], process(frame))
            assert resizer.wait(30)
    gc.collect()
    alive = [made() for made in runner.graphs_made if made() is not None]
    assert (len(runner.graphs_made), len(alive)) == (20, 8)
    assert {graph.replays for graph in alive} <= {1, 2}  # 2: captured before its first frame was resized
    resizer.clear()


def test_frames_of_one_batch_share_a_graph():
    runner = Capturing()
    resizer = ImageResizer((28, 28), CPU, runner)
    for seed in range(3):
        frames = [RawImage(noise(60, 80, 10 * seed + row), processor=SMALL) for row in range(3)]
        for found, frame in zip(resized(resizer, *frames), frames, strict=True):
            assert np.array_equal(found, process(frame))
        assert resizer.wait(30)
    (graph,) = runner.graphs_made
    assert graph().replays in (2, 3)


def test_a_size_whose_capture_fails_is_resized_without_a_graph(monkeypatch, caplog):
    runner = Capturing()
    monkeypatch.setattr(runner, "capture", lambda stage: stage() or 1 / 0)
    resizer = ImageResizer((28, 28), CPU, runner)
    for seed in range(3):
        frame = RawImage(noise(60, 80, seed), processor=SMALL)
        assert np.array_equal(resized(resizer, frame)[0], process(frame))
        assert resizer.wait(30)
    assert [record.message for record in caplog.records] == [
        "images of 80x60 are resized without a graph: division by zero"
    ]


@pytest.mark.parametrize(
    "pixels", [np.zeros((8, 8), np.uint8), np.zeros((8, 8, 3), np.float32), np.zeros((0, 8, 3), np.uint8)]
)
def test_an_array_that_is_not_an_image_is_refused(pixels):
    with pytest.raises(ImageError, match="expected uint8"):
        ImageResizer((28, 28), CPU, Runner()).upload([RawImage(pixels, processor=SMALL)])


def test_a_processor_without_exact_steps_is_refused():
    with pytest.raises(ConfigError, match=r"LiberoResize.* runs only on the host"):
        ImageResizer((28, 28), CPU, Runner()).upload([RawImage(noise(40, 4), processor=LiberoResize((28, 28)))])


def test_a_device_that_resizes_differently_is_found_at_the_start(tiny, monkeypatch):
    engine, frame = tiny.engine(), RawImage(noise(48, 64), processor=SMALL)
    check_resizing(engine, frame)
    check_resizing(engine, replace(frame, processor=LiberoResize((28, 28))))
    monkeypatch.setattr(engine, "resized", lambda frame: process(frame) ^ 1)
    with pytest.raises(EngineMismatchError, match="64x48 differently from the host"):
        check_resizing(engine, frame)


# Through the pipeline: the same messages to an engine and to the reference path, which resizes on the host.


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; torch sees none here")


@pytest.fixture(params=["cpu", pytest.param("cuda:0", marks=[pytest.mark.gpu, needs_cuda])])
def pipelines(checkpoint, request):
    """Makes a loaded source with its pipeline by the engine, and one by the reference path."""
    made, fixed = [], {"policy.device": request.param, "policy.dtype": "float32"}

    def make(**options):
        for engine in ("graph", "reference"):
            values = {**fixed, "policy.checkpoint": str(checkpoint), "policy.engine": engine}
            camera = {f"camera.{name}": value for name, value in options.items()}
            config = build({"control.output": "twist_stamped", **values, **camera})
            source = PolicySource(OpenVLAPolicy(config))
            source.load()
            made.append((source, build_pipeline(config, source.spec)))
        return made[-2:]

    yield make
    for source, _ in made:
        source.close()


INPUTS = Snapshot(JOINTS, instruction="pick up the red cube")


def steps(pair, message):
    """The step results of the engine and of the reference path, which must agree."""
    one, other = (first_step(*each, [message], INPUTS, 0.2) for each in pair)
    assert np.array_equal(one.chunk.tokens, other.chunk.tokens)
    assert np.array_equal(one.action, other.action)
    np.testing.assert_allclose(one.chunk.info["logit_margins"], other.chunk.info["logit_margins"], atol=1e-3)
    return one, other


def prepared_images(result):
    assert isinstance(result.observation.images, LazyImages)
    return result.observation.images.prepared


@pytest.mark.parametrize(
    ("encoding", "processor", "area"), [("rgb8", "openvla", 1.0), ("bgr8", "openvla", 0.9), ("rgb8", "libero", 0.9)]
)
def test_the_engine_takes_frames_and_answers_the_same(pipelines, request, encoding, processor, area):
    device = request.node.callspec.params["pipelines"]
    pair = pipelines(orientation=["rotate_180"], processor=processor, crop_area=area)
    for stamp, size in enumerate(((48, 64), (48, 64), (90, 120), (28, 28), (48, 64)), start=1):
        engine, reference = steps(pair, encode_image(noise(*size, stamp), stamp, "camera", encoding))
        on_host = processor == "libero" and device == "cpu"  # JPEG and Lanczos-3 need a GPU
        assert (prepared_images(engine), prepared_images(reference)) == (int(on_host), 1)
        assert ("policy/preprocess" in engine.stages_ms) is not on_host
        # The debug image shows the network's input.
        assert np.array_equal(engine.observation.images["image"], reference.observation.images["image"])


def test_images_without_the_same_bits_stay_on_the_host(pipelines):
    engine, reference = steps(pipelines(processor="libero"), encode_image(noise(48, 4), 1, "camera"))
    assert prepared_images(engine) == prepared_images(reference) == 1
    assert "policy/preprocess" not in engine.stages_ms


def test_a_message_that_is_not_an_image_raises_the_same_error(pipelines):
    pair = pipelines()
    damaged = encode_image(noise(48, 64), 1, "camera")[:-1]
    for source, pipeline in pair:
        with pytest.raises(ImageError, match="/camera/image_raw: "):
            first_step(source, pipeline, [damaged], INPUTS, 0.2)
    steps(pair, encode_image(noise(48, 64), 2, "camera"))
