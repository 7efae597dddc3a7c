"""Checkpoints with the metadata of those that people committed; see ``data/corpus.json``."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="the library torch is not installed (extra 'openvla')")

from safetensors.numpy import save_file

from test.corpus import POINTER, entries
from vla_ros.config import load
from vla_ros.errors import CheckpointError, VlaRosError
from vla_ros.policies.base import create
from vla_ros_models.openvla.processing import read_dataset_statistics
from vla_ros_models.pi.checkpoint import read_checkpoint
from vla_ros_models.pi.processing import ROBOTS

DATA = Path(__file__).parents[1] / "data"
PRE, POST = "policy_preprocessor", "policy_postprocessor"
STATISTICS = {"mean": 0.5, "std": 0.2, "min": -1.0, "max": 2.0}


def write_lerobots(folder: Path, facts: dict[str, Any]) -> None:
    """Write config.json, and LeRobot's processor files with statistics, unless the folder is from before them."""
    inputs = {"observation.state": {"type": "STATE", "shape": [facts["state"]]}}
    inputs |= {
        f"observation.images.{name}": {"type": "VISUAL", "shape": [3, *size]}
        for name, size in facts["images"].items()
    }
    outputs = {"action": {"type": "ACTION", "shape": [facts["action"]]}}
    (folder / "config.json").write_text(
        json.dumps(facts["config"] | {"input_features": inputs, "output_features": outputs})
    )
    if facts.get("statistics") == "none":
        return
    modes = dict.fromkeys(("VISUAL", "STATE", "ACTION"), "MEAN_STD")
    stored = {
        f"{name}.{key}": np.full([3, 1, 1] if feature["type"] == "VISUAL" else feature["shape"], value, np.float32)
        for name, feature in (inputs | outputs).items()
        for key, value in STATISTICS.items()
    }
    for name, features, step in ((PRE, inputs | outputs, "normalizer"), (POST, outputs, "unnormalizer")):
        file = f"{name}_step_0_{step}_processor.safetensors"
        options = {"eps": 1e-8, "features": features, "norm_map": modes}
        steps = [{"registry_name": f"{step}_processor", "config": options, "state_file": file}]
        if name == PRE:
            before = {"rename_observations_processor": {"rename_map": {}}, "to_batch_processor": {}}
            steps = [{"registry_name": key, "config": value} for key, value in before.items()] + steps
        (folder / f"{name}.json").write_text(json.dumps({"name": name, "steps": steps}))
        if facts.get("statistics") == "git-lfs":
            (folder / file).write_bytes(POINTER)
        else:
            save_file(stored, str(folder / file))


@pytest.mark.parametrize("facts", [one for one in entries("checkpoints") if "images" in one.values[0]])
def test_lerobots_files_that_people_committed(facts: dict[str, Any], tmp_path: Path) -> None:
    write_lerobots(tmp_path, facts)
    policy = create(load((), [f"policy.checkpoint:={tmp_path}"]))
    if "refused" in facts:
        with pytest.raises(CheckpointError, match=facts["refused"]):
            policy.describe()
        return
    spec = policy.describe()
    assert list(spec.image_keys) == list(facts["images"])
    assert sum(part.size for part in spec.state) == facts["state"]
    assert spec.dimension == facts["action"]


@pytest.mark.parametrize("facts", [one for one in entries("checkpoints") if "files" in one.values[0]])
def test_files_of_other_networks_and_parts_of_checkpoints(facts: dict[str, Any], tmp_path: Path) -> None:
    if "pointers" in facts:  # OpenVLA-OFT: everything but the weights
        shutil.copytree(DATA / "oft" / "libero_l1", tmp_path, dirs_exist_ok=True)
        for file in (*tmp_path.glob("*.safetensors"), *tmp_path.glob("*.pt")):
            file.unlink()
            file.write_bytes(POINTER)
    for name, content in facts["files"].items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps(content))
    options = ["policy.name:=oft", "policy.chunk:=8"] if "pointers" in facts else []
    with pytest.raises(VlaRosError, match=facts["refused"]):
        create(load((), [f"policy.checkpoint:={tmp_path}", *options])).describe_memory()


def numbers(size: int | list[int], seed: int) -> dict[str, list[float]]:
    """Statistics of one feature: ``size`` numbers, or ``[numbers, those before the padding with zeros]``."""
    count, used = size if isinstance(size, list) else (size, size)
    rng = np.random.default_rng(seed)
    mean, std = (np.where(np.arange(count) < used, rng.uniform(low, 1, count), 0) for low in (-1, 0.1))
    values = {"mean": mean, "std": std, "q01": mean - 2 * std, "q99": mean + 2 * std}
    return {key: value.tolist() for key, value in values.items()}


@pytest.mark.parametrize("kind", ["pi0", "pi05"])
@pytest.mark.parametrize("facts", entries("checkpoints", "pi"))
def test_openpis_statistics_that_people_committed(facts: dict[str, Any], kind: str, tmp_path: Path) -> None:
    """They are read for the robots that they fit, as openpi reads them, and refused for every other."""
    found = {name: numbers(size, seed) for seed, (name, size) in enumerate(facts["statistics"].items())}
    folder = tmp_path / "checkpoint"
    shutil.copytree(DATA / "pi" / kind / "openpi", folder)
    shutil.copy(DATA / "pi" / "architecture.json", folder)
    path = folder / "assets" / "mine" / "norm_stats.json"
    path.parent.mkdir()
    path.write_text(json.dumps({"norm_stats": found} if "state" in found else found))
    for name, robot in ROBOTS.items():
        if "refused" in facts or name not in facts["robots"]:
            words = facts.get(
                "refused", rf"found statistics of \d+ numbers, .* expected the \d+ of {name}: .*policy\.robot"
            )
            with pytest.raises(CheckpointError, match=words):
                read_checkpoint(folder, robot, asset="mine")
            continue
        processing = read_checkpoint(folder, robot, asset="mine").processing
        for key, normalization, size in (
            ("state", processing.state, robot.state),
            ("actions", processing.actions, robot.actions),
        ):
            first, second = (
                np.array(found[key][one])[:size] for one in (("q01", "q99") if kind == "pi05" else ("mean", "std"))
            )
            values = np.linspace(-0.5, 0.5, size)
            published = (
                (values - first) / (second - first + 1e-6) * 2 - 1
                if kind == "pi05"
                else (values - first) / (second + 1e-6)
            )
            np.testing.assert_allclose(normalization.normalize(values), published, rtol=1e-12)
            np.testing.assert_allclose(normalization.unnormalize(published), values, atol=1e-9)


@pytest.mark.parametrize("facts", [one for one in entries("checkpoints", "openvla") if "datasets" in one.values[0]])
def test_statistics_of_datasets_that_people_committed(facts: dict[str, Any], tmp_path: Path) -> None:
    path, sizes = tmp_path / "dataset_statistics.json", facts["datasets"]
    if sizes is None:  # Octo's layout: one dataset without its name
        path.write_text(json.dumps({"action": numbers(14, 1), "qpos": numbers(14, 2), "num_transitions": 3}))
        with pytest.raises(CheckpointError, match=facts["refused"]):
            read_dataset_statistics(tmp_path)
        return
    written = {
        name: {
            "action": numbers(size[0], 2 * seed),
            "proprio": numbers(size[1], 2 * seed + 1),
            "num_transitions": 9,
        }
        for seed, (name, size) in enumerate(sizes.items())
    }
    path.write_text(json.dumps(written))
    for group in ("action", "proprio"):
        found = read_dataset_statistics(tmp_path, group)
        assert list(found) == list(sizes)
        for name, one in found.items():
            assert one.low.tolist() == written[name][group]["q01"]
            assert one.high.tolist() == written[name][group]["q99"]
