"""The base models of the adapters in ``test/data/adapters``, and comparison with LeRobot's and peft's answers."""

import shutil
from pathlib import Path

import numpy as np

from test.policies.groot import conftest as groot
from test.policies.pi import conftest as pi
from test.policies.smolvla import conftest as smolvla
from vla_ros.config.loading import load
from vla_ros.policies.base import create
from vla_ros.types import Observation
from vla_ros_models.adapters import read_merged
from vla_ros_models.checkpoint_files import from_files

DATA = Path(__file__).parents[1] / "data" / "adapters"
CASES = ("pi05", "pi0", "smolvla", "groot")


def base_of(name, folder):
    """Write the base model of an adapter to a folder below ``folder``."""
    base = folder / "base"
    if name.startswith("pi"):
        return pi.write_layout(base, name, "lerobot")
    if name == "smolvla":
        shutil.copytree(smolvla.SHIPPED / "default", base)
        shutil.copytree(smolvla.SHIPPED / "vlm", base / "vlm")
        return base
    shutil.copytree(groot.DATA / "lerobot_absolute", base)
    shutil.copytree(groot.DATA / "backbone", base / "backbone")
    shutil.copytree(groot.DATA / "two", folder / "two")
    return base


def observation_of(name):
    """Images by LeRobot's keys, state, instruction, and noise or, for GR00T, its seed."""
    if name.startswith("pi"):
        case = pi.CASES[f"{name}_lerobot"][0]
        return case.images, case["state"], case.text("prompt"), case["noise"]
    if name == "smolvla":
        case = smolvla.load_cases("default")[0]
        return case.images, case["state"], str(case["prompt"]), case["noise"]
    case = groot.load_cases("lerobot_absolute")[0]
    images = {f"observation.images.{key}": image for key, image in case.images.items()}
    return images, case["state"], str(case["prompt"]), case["noise_seed"]


def own_actions(name, folder, *options):
    """This package's actions [H, D] with the checkpoint in ``folder``."""
    words = [f"policy.checkpoint:={folder}", "policy.device:=cpu", "policy.dtype:=float32", *options]
    policy = create(load((), words))
    policy.load()
    images, state, prompt, noise = observation_of(name)
    named = {key.removeprefix("observation.images."): image for key, image in images.items()}
    noise = groot.load_cases("lerobot_absolute")[0].noise(40) if name == "groot" else noise
    prepared = {one.key: one.processor(named[one.key]) for one in policy.spec.images if one.key in named}
    seen = Observation(prepared, prompt, stamp=0, state={"state": state}, noise=noise)
    return policy.infer(policy.start_session(), seen).actions


def check(name, adapter, base, answers):
    """Compare actions and merged weights with LeRobot's and peft's."""
    ours = own_actions(name, adapter, f"policy.base:={base}")
    assert np.abs(answers["adapted"] - answers["plain"]).max() > 0.02
    np.testing.assert_allclose(ours, answers["adapted"], rtol=0, atol=3e-4)
    stored = read_merged(adapter, base)
    changed = [key for key, one in stored.items() if one.changes or one.file.parent == adapter]
    assert changed
    for key, one in from_files(stored)(changed):
        thinned = one.float().numpy().ravel()[:: max(1, one.numel() // 64)]
        np.testing.assert_allclose(thinned, answers[f"weight.{key}"], rtol=0, atol=2e-6, err_msg=key)
