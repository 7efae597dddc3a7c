import base64
import io
import re

import numpy as np
import pytest
from PIL import Image

from vla_ros.errors import ImageError
from vla_ros_lab.report import images


def embedded(markup, kind="jpeg"):
    return base64.b64decode(re.search(rf"data:image/{kind};base64,([A-Za-z0-9+/=]+)", markup).group(1))


def decoded(markup):
    return np.asarray(Image.open(io.BytesIO(embedded(markup))))


def test_data_uri_keeps_shape_and_colour_order():
    image = np.full((40, 60, 3), (200, 30, 10), np.uint8)
    back = decoded(images.data_uri(image, 95))
    assert back.shape == image.shape
    assert np.abs(back.astype(int) - image).max() < 6


@pytest.mark.parametrize("image", [np.zeros((4, 4, 3)), np.zeros((4, 4, 4), np.uint8), np.zeros(4, np.uint8)])
def test_other_arrays_are_refused(image):
    with pytest.raises(ImageError, match="expected uint8"):
        images.data_uri(image)


def test_an_animation_contains_all_frames_in_order():
    frames = [np.full((32, 48, 3), value, np.uint8) for value in range(0, 200, 10)]
    book = Image.open(io.BytesIO(embedded(images.animation(frames, rate_hz=10, side=24), "webp")))
    assert (book.n_frames, book.size) == (20, (24, 16))
    for index, frame in enumerate(frames):
        book.seek(index)
        assert abs(np.asarray(book.convert("RGB"))[8, 12].astype(int) - frame[0, 0]).max() < 8
        assert book.info["duration"] == 100


def test_missing_images_are_reported():
    assert "No images" in images.animation([], rate_hz=10)
