"""Fixtures of the vision tests: golden images, and the serialiser of rosbags."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image


@pytest.fixture(scope="session")
def data_folder() -> Path:
    return Path(__file__).parents[1] / "data"


@pytest.fixture(scope="session")
def golden_image(data_folder: Path) -> Callable[[str], np.ndarray]:
    """Reads an image of test/data by its name."""

    def read(name: str) -> np.ndarray:
        with Image.open(data_folder / f"{name}.png") as image:
            return np.array(image)

    return read


@pytest.fixture(scope="session")
def tensorflow(data_folder: Path) -> list[dict[str, str]]:
    """SHA-256 of what TensorFlow made of each ``libero_N_image.png``: ``jpeg``, ``resized`` and ``cropped``."""
    return list(json.loads((data_folder / "vision" / "libero.json").read_text()).values())


@pytest.fixture(scope="session")
def serialize() -> Callable[..., bytes]:
    """``serialize("Image" or "CompressedImage", little_endian=..., **fields)``: CDR as rosbags writes it."""
    pytest.importorskip("rosbags", reason="the library rosbags is not installed (extra 'dds')")
    from rosbags.typesys import Stores, get_typestore

    store = get_typestore(Stores.ROS2_JAZZY)
    header = store.types["std_msgs/msg/Header"]
    time = store.types["builtin_interfaces/msg/Time"]

    def make(name: str, stamp: int = 0, frame_id: str = "", little_endian: bool = True, **fields: Any) -> bytes:
        typename = f"sensor_msgs/msg/{name}"
        fields["header"] = header(time(stamp // 10**9, stamp % 10**9), frame_id)
        fields["data"] = np.frombuffer(bytes(fields["data"]), np.uint8)
        message = store.types[typename](**fields)
        return bytes(store.serialize_cdr(message, typename, little_endian=little_endian))

    return make


@pytest.fixture(scope="session")
def sample() -> np.ndarray:
    """A smooth image without any symmetry and with three different channels, uint8 [48, 64, 3] RGB."""
    y, x = np.mgrid[0:48, 0:64]
    return np.stack([4 * x, 5 * y, (x * y) // 14], axis=-1).astype(np.uint8)
