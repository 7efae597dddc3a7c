import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vla_ros.cli.main import main
from vla_ros.config import Config, build, load
from vla_ros.config.files import config_file
from vla_ros.contract.components import parse_components
from vla_ros.contract.spec import DeltaTimestamp, ImageFeature, PolicySpec, StateFeature
from vla_ros.control.inputs import Snapshot
from vla_ros.errors import VlaRosError
from vla_ros.execution.source import PolicySource
from vla_ros.node import infer, inference
from vla_ros.node.pipeline import build_pipeline
from vla_ros.policies import Policy, Session
from vla_ros.policies.base import create
from vla_ros.types import ActionChunk, Observation
from vla_ros.vision.decode import decode_compressed
from vla_ros.vision.messages import encode_compressed, encode_image

ASK = ["infer", "--config", "demo", "--instruction", "pick up the red cube"]


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    """A camera's image of noise, which every resize changes."""
    path = tmp_path / "photo=1.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (120, 160, 3), dtype=np.uint8)).save(path)
    return path


def test_a_photo_is_turned_by_its_exif_data_as_in_the_node(tmp_path, capsys) -> None:
    pixels = np.random.default_rng(1).integers(0, 255, (120, 160, 3), dtype=np.uint8)
    tags = Image.Exif()
    tags[0x0112] = 6  # a quarter turn
    Image.fromarray(pixels).save(tmp_path / "photo.jpg", exif=tags)
    message = encode_compressed((tmp_path / "photo.jpg").read_bytes(), 1, "camera")
    Image.fromarray(decode_compressed(message).image).save(tmp_path / "node.png")
    digests = []
    for name in ("photo.jpg", "node.png"):
        assert main([*ASK, "--image", str(tmp_path / name), "--json", "-"]) == 0
        digests.append(json.loads(capsys.readouterr().out)["images"]["image"])
    assert digests[0] == digests[1]


def test_infer_returns_the_same_action_as_the_node(photo: Path, tmp_path, capsys) -> None:
    out = tmp_path / "answer.json"
    assert main([*ASK, "--image", str(photo), "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    config = load([config_file("demo")], ["policy.instruction:=pick up the red cube"])
    source = PolicySource(create(config))
    source.load()
    pipeline = build_pipeline(config, source.spec)
    frame = encode_image(np.asarray(Image.open(photo)), 1, "camera")
    chunk = inference.infer(source, pipeline, [frame], Snapshot(instruction=config.policy.instruction)).chunk
    source.close()
    assert chunk.normalized is not None
    assert chunk.tokens is not None
    assert found["actions"] == chunk.actions.tolist()
    assert found["normalized"] == chunk.normalized.tolist()
    assert found["tokens"] == chunk.tokens.tolist()
    assert set(found["stages_ms"]) == set(chunk.stages_ms)
    assert str(found["tokens"]) in capsys.readouterr().out
    assert main([*ASK, "--image", f"image={photo}", "-p", "camera.orientation:=[none]", "--json", "-"]) == 0
    turned = json.loads(capsys.readouterr().out)
    assert turned["images"]["image"]["sha256"] != found["images"]["image"]["sha256"]


class Sum(Policy):
    """Answers with what it was given."""

    spec = PolicySpec(
        (
            ImageFeature("front", delta_timestamps=(DeltaTimestamp(-1), DeltaTimestamp())),
            ImageFeature("low", required=False),
        ),
        (
            StateFeature("q", size=2),
            StateFeature(
                "past", parse_components("unused[1]"), delta_timestamps=(DeltaTimestamp(-1), DeltaTimestamp())
            ),
        ),
        dimension=0,
        noise=(3, 2),
    )

    def __init__(self, config: Config) -> None:
        self.seen: list[Observation] = []

    def infer(self, session: Session, observation: Observation) -> ActionChunk:
        self.seen.append(observation)
        start = np.zeros((3, 2)) if observation.noise is None else observation.noise
        return ActionChunk(start + observation.state["q"], 0)


@pytest.fixture
def policy(monkeypatch: pytest.MonkeyPatch) -> Sum:
    made = Sum(Config())
    monkeypatch.setattr(infer, "create", lambda config: made)
    return made


CONFIG = build({"policy.name": "hold", "policy.instruction": "go"})


def test_past_states_and_noise_are_given_by_key_or_in_order(policy: Sum, photo: Path, tmp_path) -> None:
    noise = np.random.default_rng(1).normal(size=(3, 2))
    np.save(tmp_path / "noise.npy", noise)
    found = infer.ask(CONFIG, [str(photo)], ["1,2", "past=3", "past=4"], tmp_path / "noise.npy")
    assert found["actions"] == (noise + np.array([1.0, 2.0])).tolist()
    seen = policy.seen[0]
    assert seen.images["front"].shape == (2, 120, 160, 3)
    assert seen.state["past"].tolist() == [[3], [4]]
    infer.ask(CONFIG, [f"front={photo}", f"front={photo}", f"low={photo}"], ["past=3", "q=-1,2e-1"])
    assert policy.seen[1].state["past"].tolist() == [[3], [3]]
    assert set(policy.seen[1].raw_images) == {"low"}


def test_the_instruction_reaches_the_policy_unchanged(policy: Sum, photo: Path, capsys) -> None:
    policy.spec = PolicySpec((ImageFeature("front"),), (StateFeature("q", size=2),), dimension=0)
    said = 'nimm den "🧊 Würfel": #1\\2'
    arguments = ["--image", str(photo), "--state", "1,2", "--json", "-"]
    assert main(["infer", "-p", "policy.name:=hold", "--instruction", said, *arguments]) == 0
    assert json.loads(capsys.readouterr().out)["instruction"] == policy.seen[0].instruction == said


@pytest.mark.parametrize(
    ("images", "states", "message"),
    [
        ([], ["q=1,2", "past=3"], "--image: no file for front; the policy needs"),
        (["wrist=PHOTO"], [], "found 'wrist', expected one of front, low"),
        (["PHOTO"] * 3, [], "but each of front, low has a value already"),
        (["front=PHOTO"] * 3, [], "'front': found 3, expected one, or one for each of 2"),
        (["front=/nowhere.png"], [], "--image /nowhere.png: cannot be read"),
        (["PHOTO"], ["q=1,2"], "--state: 'past': found nothing"),
        (["PHOTO"], ["q=1,2,3", "past=3"], "'q': found 3 numbers, expected 2"),
        (["PHOTO"], ["q=1,x", "past=3"], "found '1,x', expected numbers"),
        (["PHOTO"], ["q=1,nan", "past=3"], "found '1,nan', expected numbers"),
        (["PHOTO"], ["q=1,2", "past=1", "past=1", "past=1"], "'past': found 3, expected one"),
    ],
)
def test_missing_and_wrong_arguments_are_named(
    policy: Sum, photo: Path, images: list[str], states: list[str], message: str
) -> None:
    with pytest.raises(VlaRosError, match=message):
        infer.ask(CONFIG, [text.replace("PHOTO", str(photo)) for text in images], states)
    assert not policy.seen


def test_noise_and_seed_are_refused_by_policies_without_noise(policy: Sum, photo: Path, tmp_path, capsys) -> None:
    path = tmp_path / "noise.npy"
    given = [str(photo)], ["q=1,2", "past=3"], path
    with pytest.raises(VlaRosError, match="cannot be read as an array"):
        infer.ask(CONFIG, *given)
    np.save(path, np.zeros((3, 3)))
    with pytest.raises(VlaRosError, match=r"found float64 \[3, 3\], expected finite numbers \[3, 2\]"):
        infer.ask(CONFIG, *given)
    policy.spec = replace(policy.spec, noise=())
    with pytest.raises(VlaRosError, match="does not start from noise"):
        infer.ask(CONFIG, *given)
    assert main(["infer", "-p", "policy.name:=hold", "--instruction", "go", "--seed", "1"]) == 1
    assert "the policy 'hold' has no policy.seed" in capsys.readouterr().err
    assert main(["infer", "-p", "policy.name:=hold"]) == 1
    assert "--instruction is missing" in capsys.readouterr().err
