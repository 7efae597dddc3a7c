"""Golden checkpoints of the published OpenVLA-OFT code, and policies over them."""

import json
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the library torch is not installed (extra 'openvla')")


from test.policies.golden import read_cases
from vla_ros.config import CameraConfig, Config
from vla_ros.types import Observation
from vla_ros_models.oft import OFTOptions
from vla_ros_models.oft.policy import STATE_KEY, OFTPolicy

DATA = Path(__file__).parents[2] / "data" / "oft"
SETTINGS = json.loads((DATA / "settings.json").read_text())


def cases(variant):
    """Arrays of each case."""
    return read_cases(DATA / f"{variant}.npz")


def make_policy(variant, folder=None, cameras=0, **options):
    """A policy over a golden checkpoint, with what its files do not say; not loaded."""
    settings = SETTINGS[variant]
    aloha = settings["platform"] == "aloha"
    known = {
        "checkpoint": str(folder or DATA / variant),
        "chunk": settings["chunk"],
        "normalization": "min_max" if aloha else "q99",
        "images": settings["num_images_in_input"],
        "camera_side": 256 if aloha else 0,
        "device": "cpu",
        "dtype": "float32",
    }
    keys = tuple(f"camera_{index}" for index in range(cameras or known["images"]))
    return OFTPolicy(Config(policy=OFTOptions(**{**known, **options}), camera=CameraConfig(keys=keys)))


def loaded(variant, folder=None, **options):
    policy = make_policy(variant, folder, **options)
    policy.load()
    return policy


def observe(policy, variant, case):
    """One case, its images processed; LIBERO's cameras are upside down."""
    turned = SETTINGS[variant]["platform"] == "libero"
    images = {
        key: feature.processor(case[f"image_{index}"][::-1, ::-1] if turned else case[f"image_{index}"])
        for index, (key, feature) in enumerate(zip(policy.spec.image_keys, policy.spec.images, strict=True))
    }
    state = {STATE_KEY: case["proprio"]} if "proprio" in case else {}
    noise = case["noise"][0] if "noise" in case else None
    return Observation(images, str(case["instruction"]), 7, state=state, noise=noise)


def answer(policy, variant, case):
    """A chunk for one case."""
    return policy.infer(policy.start_session(), observe(policy, variant, case))
