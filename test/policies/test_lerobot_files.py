"""Folders that LeRobot's users have: features of the base model, empty slots, renamed cameras, other layouts.

The suite's tiny SmolVLA is read by the family ``smolvla``, and by ``lerobot``, which needs no LeRobot to read.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="the library torch is not installed (extra 'openvla')")

from safetensors.numpy import load_file, save_file

from vla_ros.config import ControlConfig, load
from vla_ros.contract.spec import PolicySpec
from vla_ros.control.schedule import ActionSchedule, ensemble_decay, resolve_schedule
from vla_ros.errors import CheckpointError
from vla_ros.policies.base import create
from vla_ros.policies.remote.spec import decode_spec, encode_spec
from vla_ros_models.lerobot.checkpoint import read_spec

DATA = Path(__file__).parents[1] / "data" / "smolvla"
IMAGES, STATE = "observation.images.", "observation.state"
BEFORE, AFTER = "policy_preprocessor.json", "policy_postprocessor.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    copy = tmp_path / "checkpoint"
    shutil.copytree(DATA / "default", copy)
    for path in (copy, *copy.iterdir()):
        path.chmod(0o755)
    return copy


def edit(path: Path, change: Callable[[Any], Any]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def step(content: Any, name: str) -> Any:
    return next(one for one in content["steps"] if one["registry_name"] == name)


def statistics(folder: Path) -> Path:
    found = step(json.loads((folder / BEFORE).read_text()), "normalizer_processor")["state_file"]
    return folder / str(found)


def resized(folder: Path, size: int) -> None:
    """Give the state's statistics another size, as data of another robot do."""
    path = statistics(folder)
    stored = load_file(path)
    for name in [name for name in stored if name.startswith(f"{STATE}.") and stored[name].ndim == 1]:
        stored[name] = np.resize(stored[name], size)
    save_file(stored, path)


def seen(folder: Path, *cameras: str) -> None:
    """Add the statistics of the data set's cameras."""
    path = statistics(folder)
    save_file({**load_file(path), **{f"{name}.mean": np.zeros((3, 1, 1), np.float32) for name in cameras}}, path)


def cameras(folder: Path, *names: str, rename: dict[str, str] | None = None, shape: Any = (3, 480, 640)) -> None:
    def change(config: Any) -> None:
        inputs = {name: one for name, one in config["input_features"].items() if one["type"] != "VISUAL"}
        config["input_features"] = {**inputs, **{name: {"type": "VISUAL", "shape": shape} for name in names}}

    edit(folder / "config.json", change)
    edit(
        folder / BEFORE,
        lambda c: step(c, "rename_observations_processor")["config"].update(rename_map=rename or {}),
    )


def describe(family: str, folder: Path) -> PolicySpec:
    options = [f"policy.name:={family}", f"policy.checkpoint:={folder}"]
    return create(
        load((), [*options, *([f"policy.vlm:={DATA / 'vlm'}"] if family == "smolvla" else [])])
    ).describe()


families = pytest.mark.parametrize("family", ["smolvla", "lerobot"])


@families
def test_the_statistics_give_the_states_size(family: str, folder: Path) -> None:
    resized(folder, 8)
    spec = describe(family, folder)
    assert [(one.size, len(one.middle)) for one in spec.state] == [(8, 8)]


@families
def test_without_statistics_the_configuration_gives_it(family: str, folder: Path) -> None:
    path = statistics(folder)
    save_file({name: one for name, one in load_file(path).items() if not name.startswith(STATE)}, path)
    edit(folder / BEFORE, lambda c: step(c, "normalizer_processor")["config"]["norm_map"].update(STATE="IDENTITY"))
    stated = json.loads((folder / "config.json").read_text())["input_features"][STATE]["shape"][0]
    assert [one.size for one in describe(family, folder).state] == [stated]


def test_a_state_that_the_model_cannot_take_is_refused(folder: Path) -> None:
    resized(folder, 40)
    with pytest.raises(CheckpointError, match=r"observation\.state have \[40\] numbers, expected at most 32"):
        describe("smolvla", folder)


@families
@pytest.mark.parametrize(
    ("names", "rename", "stored", "found"),
    [
        (["front", "empty_camera_0"], {}, [], ["front"]),
        (["camera1", "camera2", "camera3"], {"front": "camera1"}, [], ["front", "camera2", "camera3"]),
        (["camera1", "camera2", "camera3"], {"front": "camera1"}, ["front"], ["front"]),
        (["camera1", "camera2", "camera3"], {"a": "camera1", "b": "camera3"}, ["a", "b"], ["a", "b"]),
        (["camera1", "camera2"], {"a": "camera1"}, ["camera1"], ["a"]),
        (["camera1", "camera2"], {}, ["another"], ["camera1", "camera2"]),
        (["image", "empty_camera_0"], {"right": "empty_camera_0"}, [], ["image", "right"]),
    ],
)
def test_slots_that_training_masked_stay_empty(
    family: str, names: list[str], rename: dict[str, str], stored: list[str], found: list[str], folder: Path
) -> None:
    cameras(
        folder,
        *(IMAGES + name for name in names),
        rename={IMAGES + old: IMAGES + new for old, new in rename.items()},
    )
    seen(folder, *(IMAGES + name for name in stored))
    spec = describe(family, folder)
    assert list(spec.image_keys) == found
    assert not any(image.required for image in spec.images), "LeRobot masks a missing camera"


@families
@pytest.mark.parametrize("shape", [[3, 256, 256], [256, 256, 3], [480, 640, 3]])
def test_the_shapes_of_images_are_not_read(family: str, shape: list[int], folder: Path) -> None:
    cameras(folder, f"{IMAGES}front", shape=shape)
    (image,) = describe(family, folder).images
    assert (image.key, image.takes) == ("front", None)


@families
def test_an_instruction_among_the_features_is_no_state(family: str, folder: Path) -> None:
    feature = {"type": "LANGUAGE", "shape": [1]}
    edit(folder / "config.json", lambda c: c["input_features"].update({"observation.instruction": feature}))
    assert [one.key for one in describe(family, folder).state] == ["state"]


@families
def test_a_folder_from_before_lerobot_04_names_the_migration(family: str, folder: Path) -> None:
    for name in (BEFORE, AFTER):
        (folder / name).unlink()
    with pytest.raises(CheckpointError, match=r"migrate_policy_normalization --pretrained-path .*checkpoint$"):
        describe(family, folder)


@families
def test_a_git_lfs_pointer_is_named(family: str, folder: Path) -> None:
    statistics(folder).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(CheckpointError, match="a git-lfs pointer, not the file itself; run 'git lfs pull'"):
        describe(family, folder)


def test_a_base_model_without_statistics_says_so(folder: Path) -> None:
    edit(folder / BEFORE, lambda c: step(c, "normalizer_processor").pop("state_file"))
    with pytest.raises(CheckpointError, match="a base model has none until it is fine-tuned"):
        describe("smolvla", folder)


def act(folder: Path, **more: Any) -> PolicySpec:
    """The spec of an ACT checkpoint with these entries of ``config.json``."""

    def change(config: Any) -> None:
        kept = {key: config[key] for key in ("input_features", "output_features")}
        config.clear()
        config.update({"type": "act", **kept, "chunk_size": 20, "n_action_steps": 1, **more})

    edit(folder / "config.json", change)
    return read_spec(folder)


def test_acts_temporal_ensembling_is_obeyed(folder: Path) -> None:
    spec = act(folder, temporal_ensemble_coeff=-0.2)
    assert (spec.horizon, spec.ensemble_decay, spec.uses_instruction) == (20, -0.2, False)
    control = ControlConfig()
    assert resolve_schedule(control.schedule, spec) == ActionSchedule(control, spec).kind == "ensemble"
    assert ensemble_decay(control, spec) == -0.2
    assert ensemble_decay(ControlConfig(ensemble_decay=0.5), spec) == 0.5
    assert decode_spec(encode_spec("lerobot", spec)).ensemble_decay == -0.2
    without = act(folder, temporal_ensemble_coeff=None)
    assert (without.ensemble_decay, without.execute_steps) == (None, 1)
    assert (resolve_schedule("auto", without), ensemble_decay(control, without)) == ("blend", 0.01)


@pytest.mark.parametrize("value", ["0.01", True, 1e9, float("nan"), [0.01]])
def test_another_coefficient_is_refused_by_name(value: Any, folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"temporal_ensemble_coeff, by which chunks are averaged: found"):
        act(folder, temporal_ensemble_coeff=value)


def test_an_act_checkpoint_has_no_slots_to_leave_empty(folder: Path) -> None:
    cameras(folder, f"{IMAGES}front", f"{IMAGES}wrist")
    spec = act(folder)
    assert [(image.key, image.required, image.takes) for image in spec.images] == [
        ("front", True, (480, 640)),
        ("wrist", True, (480, 640)),
    ]
    resized(folder, 9)
    with pytest.raises(CheckpointError, match="the statistics have 9 numbers; the files belong to different"):
        read_spec(folder)
