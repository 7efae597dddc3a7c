import time

import numpy as np

from vla_ros.control.watchdog import digest


def test_digests_differ_only_for_different_pixels() -> None:
    rng = np.random.default_rng(0)
    image = rng.integers(0, 256, (480, 640, 3), dtype=np.uint8)
    noisy = np.clip(image.astype(int) + rng.integers(-1, 2, image.shape), 0, 255).astype(np.uint8)
    assert digest(image) == digest(image.tobytes()) == digest(memoryview(image.tobytes()))
    assert digest(image) != digest(noisy)
    one_channel = image.copy()
    one_channel[..., 1] ^= 1
    assert digest(image) != digest(one_channel)
    assert digest(b"") == digest(b"", skip=12)
    assert digest(b"stamp 1 abc", skip=8) == digest(b"stamp 2 abc", skip=8) != digest(b"stamp 2 abd", skip=8)
    assert digest(b"\0" * 10) != digest(b"\0" * 11)


def test_a_digest_of_a_vga_frame_takes_a_fraction_of_a_millisecond() -> None:
    data = bytes(640 * 480 * 3)
    samples = []
    for _ in range(50):
        began = time.perf_counter_ns()
        digest(data)
        samples.append(time.perf_counter_ns() - began)
    assert min(samples) < 500_000
