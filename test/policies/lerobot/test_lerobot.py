"""LeRobot's policies through our interface, against LeRobot's own calls in the same process."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

lerobot = pytest.importorskip("lerobot", reason="needs an environment with LeRobot")

import torch  # noqa: E402
from lerobot.configs.policies import PreTrainedConfig  # noqa: E402
from lerobot.configs.types import FeatureType, PolicyFeature  # noqa: E402
from lerobot.policies.factory import (  # noqa: E402
    get_policy_class,
    make_policy_config,
    make_pre_post_processors,
)

from vla_ros.config import Config  # noqa: E402
from vla_ros.errors import CheckpointError, ConfigError, VlaRosError  # noqa: E402
from vla_ros.policies.lerobot.options import LeRobotOptions  # noqa: E402
from vla_ros.policies.lerobot.policy import LeRobotPolicy  # noqa: E402
from vla_ros.types import Observation  # noqa: E402

FRONT, STATE = "observation.images.front", "observation.state"
SMALL: dict[str, dict[str, Any]] = {
    "act": {
        "dim_model": 32,
        "n_heads": 2,
        "dim_feedforward": 64,
        "n_encoder_layers": 1,
        "latent_dim": 8,
        "chunk_size": 10,
        "n_action_steps": 10,
        "pretrained_backbone_weights": None,
    },
    "diffusion": {
        "down_dims": (32, 64),
        "n_groups": 4,
        "horizon": 16,
        "n_action_steps": 8,
        "num_inference_steps": 3,
        "pretrained_backbone_weights": None,
    },
}


@pytest.fixture(scope="module", params=SMALL)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with random weights and statistics, written by the library."""
    torch.manual_seed(0)
    inputs = {FRONT: PolicyFeature(FeatureType.VISUAL, (3, 64, 96)), STATE: PolicyFeature(FeatureType.STATE, (7,))}
    outputs = {"action": PolicyFeature(FeatureType.ACTION, (7,))}
    config = make_policy_config(
        request.param, input_features=inputs, output_features=outputs, device="cpu", **SMALL[request.param]
    )
    policy = get_policy_class(request.param)(config)
    middle = torch.randn(7)
    numbers = {"mean": middle, "std": torch.full((7,), 0.5), "min": middle - 2, "max": middle + 2}
    colour = {"mean": 0.4, "std": 0.3, "min": 0.0, "max": 1.0}
    statistics = {STATE: numbers, "action": numbers}
    statistics[FRONT] = {name: torch.full((3, 1, 1), value) for name, value in colour.items()}
    where = tmp_path_factory.mktemp("lerobot") / str(request.param)
    before, after = make_pre_post_processors(config, dataset_stats=statistics)
    for written in (policy, before, after):
        written.save_pretrained(where)
    return where


def loaded(folder: Path, **options: Any) -> LeRobotPolicy:
    policy = LeRobotPolicy(
        Config(policy=LeRobotOptions("lerobot", checkpoint=str(folder), device="cpu", **options))
    )
    policy.load()
    return policy


def test_chunks_are_the_librarys_to_the_bit(folder: Path) -> None:
    policy = loaded(folder)
    moments = len(policy.spec.images[0].moments)
    random = np.random.default_rng(0)
    past = () if moments == 1 else (moments,)
    image = random.integers(0, 256, (*past, 64, 96, 3), dtype=np.uint8)
    state = random.normal(size=(*past, 7))
    torch.manual_seed(3)
    observation = Observation({"front": image}, "lift the cube", 5, state={"state": state})
    chunk = policy.infer(policy.start_session(), observation)

    config = PreTrainedConfig.from_pretrained(folder)
    theirs = get_policy_class(config.type).from_pretrained(folder, config=config)
    before, after = make_pre_post_processors(config, str(folder))
    batch: dict[str, Any] = {
        FRONT: torch.from_numpy(np.moveaxis(image, -1, -3).copy())[None].float() / 255,
        STATE: torch.from_numpy(state.astype(np.float32))[None],
        "task": ["lift the cube"],
    }
    torch.manual_seed(3)
    normalized = theirs.predict_action_chunk(before(batch))
    assert chunk.stamp == 5
    assert chunk.normalized is not None
    assert np.array_equal(chunk.normalized, normalized[0].detach().double().numpy())
    assert np.array_equal(chunk.actions, after(normalized)[0].detach().double().numpy())
    assert (policy.spec.horizon, policy.spec.dimension) == chunk.actions.shape


def test_features_are_those_of_the_checkpoint(folder: Path) -> None:
    spec = loaded(folder).spec
    assert [image.key for image in spec.images] == ["front"]
    assert [(state.key, state.size) for state in spec.state] == [("state", 7)]
    expected = {"act": (1, 10), "diffusion": (2, 8)}[folder.name]
    assert (len(spec.images[0].moments), spec.horizon) == expected
    assert spec.images[0].moments[-1].steps == 0


def test_a_wrong_checkpoint_is_explained(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected a folder that LeRobot wrote"):
        loaded(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"has no config.json"):
        loaded(tmp_path)
    text = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(text))
    with pytest.raises(CheckpointError, match="migrate it with"):
        loaded(tmp_path)
    for name in ("policy_preprocessor.json", "policy_postprocessor.json"):
        (tmp_path / name).write_text((folder / name).read_text())
    (tmp_path / "config.json").write_text(json.dumps({**text, "type": "acting"}))
    with pytest.raises(CheckpointError, match="'acting' is no policy"):
        loaded(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(text))
    step = {"registry_name": "tokenizer_processor", "config": {"tokenizer_name": "google/paligemma-3b-pt-224"}}
    (tmp_path / "policy_preprocessor.json").write_text(json.dumps({"name": "x", "steps": [step]}))
    with pytest.raises(CheckpointError, match="on the hub, and nothing is downloaded"):
        loaded(tmp_path)


def test_an_image_of_another_size_is_refused(folder: Path) -> None:
    policy = loaded(folder)
    past = () if len(policy.spec.images[0].moments) == 1 else (2,)
    images = {"front": np.zeros((*past, 48, 64, 3), np.uint8)}
    with pytest.raises(VlaRosError, match="is 64x48, the checkpoint was trained on 96x64"):
        policy.infer(policy.start_session(), Observation(images, "lift", 0, state={"state": np.zeros((*past, 7))}))


def test_the_same_seed_gives_the_same_chunk(folder: Path) -> None:
    options = LeRobotOptions("lerobot", checkpoint=str(folder), device="cpu", seed=4)
    assert dataclasses.replace(options).seed == 4
    shape = (2,) if folder.name == "diffusion" else ()
    observation = Observation(
        {"front": np.zeros((*shape, 64, 96, 3), np.uint8)}, "lift", 0, state={"state": np.zeros((*shape, 7))}
    )
    chunks = [(policy := loaded(folder, seed=4)).infer(policy.start_session(), observation) for _ in range(2)]
    assert np.array_equal(chunks[0].actions, chunks[1].actions)
