"""Milliseconds of each vision stage, from message to the policy's image.

Run ``OMP_NUM_THREADS=1 python benchmarks/vision.py [--width 640] [--height 480] [--repeat 200]``: one thread, as
next to a policy that uses the others.
"""

from __future__ import annotations

import argparse
import io
import time
from collections.abc import Callable

import cv2
import numpy as np
from PIL import Image

from vla_ros.config.sections import CameraConfig
from vla_ros.contract.spec import PolicySpec
from vla_ros.vision.decode import decode_compressed, decode_image
from vla_ros.vision.geometry import make_orientation
from vla_ros.vision.messages import encode_compressed, encode_image, image_header, image_stamp
from vla_ros.vision.preprocess import Preprocessor, process
from vla_ros.vision.processors import crop_center, jpeg_round_trip, resize_bicubic, resize_lanczos3


def scene(height: int, width: int) -> np.ndarray:
    """Make a smooth image with some noise: uint8 [height, width, 3]."""
    noise = np.random.default_rng(0)
    coarse = noise.integers(0, 256, (height // 40 + 2, width // 40 + 2, 3), np.uint8)
    smooth = cv2.resize(coarse, (width, height), interpolation=cv2.INTER_CUBIC).astype(np.int16)
    return np.clip(smooth + noise.normal(0, 3, smooth.shape), 0, 255).astype(np.uint8)


def measure(stage: Callable[[], object], repeat: int) -> tuple[float, float, float]:
    """Return the minimum, median and 99th percentile of a stage in milliseconds, after three unmeasured calls."""
    for _ in range(3):
        stage()
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        stage()
        times.append((time.perf_counter() - start) * 1e3)
    return float(min(times)), float(np.percentile(times, 50)), float(np.percentile(times, 99))


def main() -> None:
    """Measure every stage and print one line each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=640)
    parser.add_argument("--height", type=int, default=480)
    parser.add_argument("--repeat", type=int, default=200)
    arguments = parser.parse_args()
    cv2.setNumThreads(1)

    image = scene(arguments.height, arguments.width)
    raw = {name: encode_image(image, 0, "cam", name) for name in ("rgb8", "bgr8")}
    raw["yuv422_yuy2"] = encode_image(image[..., :2], 0, "cam", "yuv422_yuy2")
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "JPEG", quality=80)
    jpeg = encode_compressed(buffer.getvalue(), 0, "cam", "jpeg")
    resized = resize_lanczos3(image)
    turned = Preprocessor(
        CameraConfig(pipeline=("libero",), orientation=("rotate_180",), crop_area=(0.9,)), PolicySpec()
    )
    plain = Preprocessor(CameraConfig(pipeline=("openvla",)), PolicySpec())

    stages: dict[str, Callable[[], object]] = {
        "image_stamp": lambda: image_stamp(raw["rgb8"]),
        "image_header": lambda: image_header(raw["rgb8"]),
        **{f"decode {name}": lambda cdr=cdr: decode_image(cdr) for name, cdr in raw.items()},
        f"decode jpeg ({len(jpeg) // 1024} KiB)": lambda: decode_compressed(jpeg),
        "encode rgb8": lambda: encode_image(image, 0, "cam"),
        "orient rotate_180": lambda: make_orientation("rotate_180")(image),
        "jpeg round trip": lambda: jpeg_round_trip(image),
        "resize lanczos3": lambda: resize_lanczos3(image),
        "crop 0.9": lambda: crop_center(resized, 0.9),
        "resize bicubic": lambda: resize_bicubic(image),
        "all: openvla": lambda: process(plain(raw["rgb8"])),
        "all: libero, rotate_180, crop 0.9": lambda: process(turned(raw["rgb8"])),
    }
    print(f"{arguments.width} x {arguments.height}, {arguments.repeat} repeats, milliseconds")
    print(f"{'stage':36}{'least':>9}{'p50':>9}{'p99':>9}")
    for name, stage in stages.items():
        print(f"{name:36}" + "".join(f"{value:9.3f}" for value in measure(stage, arguments.repeat)))


if __name__ == "__main__":
    main()
