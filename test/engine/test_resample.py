"""Image processors on a device against the host's, on random and smooth images: no difference."""

import numpy as np
import pytest
import torch

from vla_ros.config.sections import ORIENTATIONS
from vla_ros.errors import ConfigError
from vla_ros.vision.preprocess import TURNS
from vla_ros.vision.processors import (
    LiberoResize,
    LinearResize,
    ResizeNaive,
    ResizeWithPad,
    resize_bicubic,
    resize_with_pad_linear,
)
from vla_ros_models.engine.resample import make_pipeline, make_turn, resampling_on
from vla_ros_models.oft.processing import OFTResize

CPU = torch.device("cpu")
SIZES = [(480, 640), (720, 1280), (128, 128), (224, 224), (240, 224), (33, 500)]


def samples(height, width):
    rng = np.random.default_rng(height)
    noise = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
    y, x = np.mgrid[0:height, 0:width]
    smooth = np.stack([127 + 120 * np.sin(x / 20), 255 * y / height, (x + y) % 256], -1).astype(np.uint8)
    return noise, smooth


def run(pipeline, image):
    return pipeline(torch.from_numpy(image)[None])[0].numpy()


CROPS = [ResizeNaive((224, 200), area) for area in (0.9, 0.5, 0.05)]


@pytest.mark.parametrize("source", [*SIZES, (1, 1), (500, 33), (2, 300), (1080, 1920), (301, 299)])
@pytest.mark.parametrize("processor", [ResizeNaive(), *CROPS, ResizeWithPad(), ResizeWithPad((28, 40))], ids=str)
def test_processors_on_a_cpu(source, processor):
    pipeline = make_pipeline(processor, source, CPU)
    for image in samples(*source):
        assert np.array_equal(run(pipeline, image), processor(image))


def test_bicubic_along_one_axis_from_and_to_any_length():
    rng = np.random.default_rng(0)
    lengths = [(int(source), int(target)) for source, target in rng.integers(1, (4000, 500), (250, 2))]
    for source, target in [*lengths, (1, 1), (1, 224), (3840, 1), (224, 224), (16384, 224)]:
        image = rng.integers(0, 256, (3, source, 3), dtype=np.uint8)
        pipeline = make_pipeline(ResizeNaive((3, target)), (3, source), CPU)
        assert np.array_equal(run(pipeline, image), resize_bicubic(image, (3, target))), (source, target)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; torch sees none here")
@pytest.mark.parametrize(
    "processor",
    [
        *(LiberoResize(), OFTResize(), OFTResize(camera_side=256), ResizeNaive(), ResizeNaive(crop_area=0.9)),
        *(ResizeWithPad((224, 224)), LinearResize((224, 224), centred=False), LinearResize((512, 512))),
    ],
)
def test_processors_run_on_a_gpu(processor):
    for source in (*SIZES, (256, 256), (1, 5), (250, 333), (17, 7)):
        for image in (*samples(*source), 255 * (samples(*source)[0] // 128)):
            found = make_pipeline(processor, source, torch.device("cuda:0"))(torch.from_numpy(image)[None].cuda())
            expected = processor(image)
            if processor.floating:
                expected = resize_with_pad_linear(image, processor.size, processor.centred)
            assert np.array_equal(found[0].cpu().numpy(), expected), source


@pytest.mark.parametrize("orientation", ORIENTATIONS)
def test_turns(orientation):
    image = samples(60, 90)[0]
    assert np.array_equal(run(make_turn(orientation), image), TURNS[orientation](image))
    pipeline = make_pipeline(ResizeNaive((28, 28)), (60, 90), CPU, orientation)
    upright = np.ascontiguousarray(TURNS[orientation](image))
    assert np.array_equal(run(pipeline, image), resize_bicubic(upright, (28, 28)))


def test_batches():
    images = np.stack(samples(100, 120))
    pipeline = make_pipeline(ResizeNaive((28, 28), 0.9), (100, 120), CPU)
    together = pipeline(torch.from_numpy(images)).numpy()
    for image, result in zip(images, together, strict=True):
        assert np.array_equal(result, run(pipeline, image))


def test_processors_that_a_device_cannot_run_are_refused():
    with pytest.raises(ConfigError, match=r"LiberoResize\(size=\(5, 5\), crop_area=1.0\) runs only on the host"):
        make_pipeline(LiberoResize((5, 5)), (10, 4), CPU)
    assert LiberoResize().resampling((40, 4)) is None
    assert resampling_on(CPU, OFTResize(), (480, 640)) is None
    with pytest.raises(ConfigError, match="'up'"):
        make_pipeline(ResizeNaive((5, 5)), (10, 10), CPU, orientation="up")
