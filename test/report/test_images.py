import base64
import io
import re

import numpy as np
import pytest
from PIL import Image

from vla_ros.errors import ImageError
from vla_ros.report import images


def decoded(markup):
    data = re.search(r"data:image/jpeg;base64,([A-Za-z0-9+/=]+)", markup).group(1)
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(data))))


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
    frames = [np.full((32, 48, 3), value, np.uint8) for value in range(0, 200, 10)]  # 20 frames: 16 + 4
    book = images.animation(frames, rate_hz=10, side=48)
    sheet = decoded(book)
    assert sheet.shape == (64, 16 * 48, 3)
    assert 'data-frames="20"' in book
    assert 'data-columns="16"' in book
    assert 'data-ms="100"' in book
    for index, frame in enumerate(frames):
        y, x = index // 16 * 32, index % 16 * 48
        assert abs(int(sheet[y + 16, x + 24, 0]) - int(frame[0, 0, 0])) < 8


def test_long_recordings_are_thinned_and_keep_their_duration():
    frames = [np.zeros((8, 8, 3), np.uint8)] * 1000
    book = images.animation(frames, rate_hz=10, most=100)
    assert 'data-frames="100"' in book
    assert 'data-ms="1000"' in book


def test_missing_images_are_reported():
    assert "No images" in images.animation([])
