"""LeRobot's policies, compared with LeRobot's own calls in the same process."""

import dataclasses
import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("lerobot", reason="needs an environment with LeRobot")

import torch
from lerobot.configs.policies import PreTrainedConfig
from lerobot.policies.factory import get_policy_class, make_policy_config, make_pre_post_processors
from lerobot.policies.rtc.configuration_rtc import RTCConfig
from lerobot.processor import NormalizerProcessorStep, TransitionKey, create_transition
from websockets.sync.client import connect

from test.serve.serving import served
from vla_ros.config import Config, load
from vla_ros.contract.features import complete_spec
from vla_ros.errors import CheckpointError, ConfigError, MissingDependencyError, VlaRosError
from vla_ros.policies.base import Policy, create
from vla_ros.policies.remote.messages import pack, unpack
from vla_ros.types import Observation, PreviousChunk
from vla_ros_models.lerobot import make
from vla_ros_models.lerobot.options import LeRobotOptions
from vla_ros_models.lerobot.policy import LeRobotPolicy

from .conftest import PI0_FAST, write, write_fast_tokenizers, write_molmoact2

FRONT, STATE = "observation.images.front", "observation.state"
HUB = "google/paligemma-3b-pt-224"


def loaded(folder: Path, **options: Any) -> LeRobotPolicy:
    policy = LeRobotPolicy(
        Config(policy=LeRobotOptions("lerobot", checkpoint=str(folder), device="cpu", **options))
    )
    policy.load()
    return policy


@pytest.fixture
def policy(folder: Path, words: Path) -> LeRobotPolicy:
    return loaded(folder, tokenizer=str(words))


def observation(policy: Policy, previous: PreviousChunk | None = None) -> Observation:
    times = len(policy.spec.images[0].delta_timestamps)
    random, past = np.random.default_rng(0), () if times == 1 else (times,)
    image = random.integers(0, 256, (*past, 64, 96, 3), dtype=np.uint8)
    return Observation(
        {"front": image}, "lift the cube", 5, state={"state": random.normal(size=(*past, 7))}, previous=previous
    )


def theirs(folder: Path, words: Path, asked: Observation) -> tuple[Any, Any]:
    """Normalised and un-normalised chunk from LeRobot's own calls."""
    config = PreTrainedConfig.from_pretrained(folder)
    rtc = asked.previous is not None
    if rtc:
        config.rtc_config = RTCConfig()
    policy = get_policy_class(config.type).from_pretrained(folder, config=config)
    names_words = config.type not in ("act", "diffusion", "molmoact2")
    overrides = {"tokenizer_processor": {"tokenizer_name": str(words)}} if names_words else {}
    if config.type == "pi0_fast":
        overrides["action_tokenizer_processor"] = {"paligemma_tokenizer_name": str(words)}
    before, after = make_pre_post_processors(config, str(folder), preprocessor_overrides=overrides)
    image = torch.from_numpy(np.moveaxis(asked.images["front"], -1, -3).copy())
    batch: dict[str, Any] = {
        FRONT: image[None].float() / 255,
        STATE: torch.from_numpy(asked.state["state"].astype(np.float32))[None],
        "task": [asked.instruction],
    }
    guidance: dict[str, Any] = {}
    if asked.previous is not None:
        (normalize,) = (step for step in before.steps if isinstance(step, NormalizerProcessorStep))
        left = create_transition(action=torch.from_numpy(asked.previous.actions).float()[None])
        guidance["prev_chunk_left_over"] = normalize(left)[TransitionKey.ACTION]
        guidance["inference_delay"] = asked.previous.delay
    torch.manual_seed(3)
    chunk = policy.predict_action_chunk(before(batch), **guidance)
    return chunk[0].detach().double().numpy(), after(chunk)[0].detach().double().numpy()


def test_pi0_fast_decodes_what_lerobot_decodes(
    tmp_path: Path, small_gemma: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    words, actions = tmp_path / "words", tmp_path / "actions"
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    write_fast_tokenizers(words, actions)
    named = {"text_tokenizer_name": str(words), "action_tokenizer_name": str(actions)}
    folder = write("pi0_fast", words, tmp_path / "pi0_fast", **PI0_FAST, **named)
    policy = loaded(folder, tokenizer=str(words))
    assert not policy.spec.continues_chunks
    asked = observation(policy)
    normalized, expected = theirs(folder, words, asked)
    chunk = policy.infer(policy.start_session(), asked)
    assert chunk.normalized is not None
    assert np.array_equal(chunk.normalized, normalized)
    assert np.array_equal(chunk.actions, expected)


@pytest.mark.filterwarnings("ignore:.*rope_config_validation")
def test_molmoact2_infers_and_continues_as_lerobot_does(tmp_path: Path, words: Path) -> None:
    folder = write("molmoact2", words, tmp_path / "molmoact2", **write_molmoact2(tmp_path / "base"))
    policy = loaded(folder)
    assert policy.spec.continues_chunks
    alone = observation(policy)
    torch.manual_seed(3)
    executed = policy.infer(policy.start_session(), alone)
    assert np.array_equal(executed.actions, theirs(folder, words, alone)[1])
    asked = observation(policy, PreviousChunk(executed.actions[2:], delay=3))
    torch.manual_seed(3)
    continued = policy.infer(policy.start_session(), asked)
    assert np.array_equal(continued.actions, theirs(folder, words, asked)[1])
    assert not np.array_equal(continued.actions, executed.actions)


@contextmanager
def asked_through(policy: Policy) -> Iterator[Policy]:
    """A client that is connected to a server with ``policy``."""
    with served(policy) as (_, port):
        options = [f"policy.server:=ws://127.0.0.1:{port}", "timeouts.inference:=60.0"]
        with closing(create(load((), ["policy.name:=remote", *options]))) as client:
            client.load()
            yield client


def test_chunks_equal_lerobots_to_the_bit(folder: Path, words: Path, policy: LeRobotPolicy) -> None:
    asked = observation(policy)
    normalized, actions = theirs(folder, words, asked)
    torch.manual_seed(3)
    chunk = policy.infer(policy.start_session(), asked)
    assert chunk.stamp == 5
    assert chunk.normalized is not None
    assert np.array_equal(chunk.normalized, normalized)
    assert np.array_equal(chunk.actions, actions)
    assert (policy.spec.horizon, policy.spec.dimension) == chunk.actions.shape


def test_chunks_through_the_server_equal_lerobots_to_the_bit(
    folder: Path, words: Path, policy: LeRobotPolicy
) -> None:
    asked = observation(policy)
    with asked_through(policy) as client:
        assert client.spec.horizon == policy.spec.horizon
        session = client.start_session()
        torch.manual_seed(3)
        chunk = client.infer(session, asked)
    assert np.array_equal(chunk.actions, theirs(folder, words, asked)[1])


@pytest.mark.parametrize("folder", ["act"], indirect=True)
def test_a_child_process_returns_the_same_chunk(folder: Path, policy: LeRobotPolicy) -> None:
    options = LeRobotOptions("lerobot", checkpoint=str(folder), device="cpu", python=sys.executable)
    with closing(make(Config(policy=options))) as child:
        assert child.describe().images == policy.spec.images
        child.load()
        with closing(child.start_session()) as session:
            actions = child.infer(session, observation(policy)).actions
    assert child.spec == policy.spec
    assert np.array_equal(actions, policy.infer(policy.start_session(), observation(policy)).actions)


@pytest.mark.parametrize("folder", ["smolvla", "pi0", "pi05"], indirect=True)
def test_continued_chunks_equal_lerobots_to_the_bit(folder: Path, words: Path, policy: LeRobotPolicy) -> None:
    assert policy.spec.continues_chunks
    alone = observation(policy)
    torch.manual_seed(4)
    executed = policy.infer(policy.start_session(), alone)
    asked = observation(policy, PreviousChunk(executed.actions[2:], delay=3))
    normalized, _ = theirs(folder, words, asked)
    torch.manual_seed(3)
    continued = policy.infer(policy.start_session(), asked)
    assert continued.normalized is not None
    assert np.array_equal(continued.normalized, normalized)
    torch.manual_seed(3)
    fresh = policy.infer(policy.start_session(), alone)

    def away(chunk: Any) -> float:
        return float(np.abs(chunk.actions[:3] - executed.actions[2:5]).mean())

    assert away(continued) < 0.5 * away(fresh)


def test_the_spec_has_the_checkpoints_features(folder: Path, policy: LeRobotPolicy) -> None:
    spec = policy.spec
    assert [image.key for image in spec.images] == ["front"]
    assert [(state.key, state.size) for state in spec.state] == [("state", 7)]
    assert (len(spec.images[0].delta_timestamps), spec.horizon) == {"diffusion": (2, 8)}.get(folder.name, (1, 10))
    assert spec.images[0].delta_timestamps[-1].steps == 0
    assert spec.continues_chunks == (folder.name in ("smolvla", "pi0", "pi05"))


def damaged(folder: Path, to: Path, **changed: Any) -> Path:
    """The text files of a checkpoint with another ``config.json``."""
    for name in ("policy_preprocessor.json", "policy_postprocessor.json"):
        (to / name).write_text((folder / name).read_text())
    (to / "config.json").write_text(json.dumps({**json.loads((folder / "config.json").read_text()), **changed}))
    return to


@pytest.mark.parametrize("folder", ["act"], indirect=True)
def test_a_wrong_checkpoint_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected a folder that LeRobot wrote"):
        loaded(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"has no config.json"):
        loaded(tmp_path)
    with pytest.raises(CheckpointError, match="cannot load this 'acting' checkpoint: ValueError"):
        loaded(damaged(folder, tmp_path, type="acting"))
    (tmp_path / "policy_preprocessor.json").unlink()
    with pytest.raises(CheckpointError, match="migrate it with"):
        loaded(tmp_path)


@pytest.mark.parametrize("folder", ["act"], indirect=True)
def test_a_missing_library_is_reported(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*_: Any) -> Any:
        raise ImportError("'transformers' is required but not installed")

    monkeypatch.setattr("lerobot.policies.factory.get_policy_class", absent)
    with pytest.raises(MissingDependencyError, match=r"pip install 'lerobot\[act\]<0.7'"):
        loaded(damaged(folder, tmp_path))


@pytest.mark.parametrize(("folder", "named"), [("pi05", HUB), ("smolvla", "org/backbone")], indirect=["folder"])
def test_a_tokenizer_is_not_downloaded(folder: Path, named: str, words: Path, tmp_path: Path) -> None:
    changed = damaged(folder, tmp_path, **({"vlm_model_name": named} if folder.name == "smolvla" else {}))
    content = json.loads((folder / "policy_preprocessor.json").read_text())
    for step in content["steps"]:
        if "tokenizer_name" in step["config"]:
            step["config"]["tokenizer_name"] = named
            step.pop("artifacts", None)  # a folder that newer releases save
    (changed / "policy_preprocessor.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=f"'{named}' on the hub, but nothing is downloaded"):
        loaded(changed)
    with pytest.raises(ConfigError, match="expected the folder of a tokenizer"):
        loaded(changed, tokenizer=str(tmp_path / "nowhere"))
    for file in folder.glob("*.safetensors"):
        (changed / file.name).symlink_to(file)
    assert loaded(changed, tokenizer=str(words)).spec.dimension == 7


@pytest.mark.parametrize("folder", ["pi05"], indirect=True)
def test_a_tokenizer_that_the_checkpoint_has_is_used(folder: Path, words: Path, tmp_path: Path) -> None:
    """LeRobot newer than 0.6.1 saves it there; an older one loads such a checkpoint, too."""
    content = json.loads((damaged(folder, tmp_path) / "policy_preprocessor.json").read_text())
    for step in content["steps"]:
        if "tokenizer_name" in step["config"]:
            step["config"]["tokenizer_name"] = "tokenizer"
    (tmp_path / "policy_preprocessor.json").write_text(json.dumps(content))
    for file in folder.glob("*.safetensors"):
        (tmp_path / file.name).symlink_to(file)
    shutil.copytree(words, tmp_path / "tokenizer")
    asked = observation(policy := loaded(tmp_path, seed=3))
    chunk = policy.infer(policy.start_session(), asked)
    other = loaded(folder, seed=3, tokenizer=str(words))
    assert np.array_equal(chunk.actions, other.infer(other.start_session(), asked).actions)


REMEMBERS = "use_visual_memory" in {field.name for field in dataclasses.fields(make_policy_config("pi05"))}


@pytest.mark.skipif(REMEMBERS, reason="this LeRobot knows the memory of pi0.5")
@pytest.mark.parametrize("folder", ["pi05"], indirect=True)
def test_a_memory_that_lerobot_does_not_know_is_refused(folder: Path, words: Path, tmp_path: Path) -> None:
    changed = damaged(folder, tmp_path, use_visual_memory=True, memory_frames=3, memory_stride=2)
    with pytest.raises(CheckpointError, match=r"`use_visual_memory`.* are not valid .* a newer LeRobot wrote it"):
        loaded(changed, tokenizer=str(words))


@pytest.mark.skipif(not REMEMBERS, reason="needs LeRobot's main branch of August 2026 or newer")
@pytest.mark.parametrize("own", [False, True], ids=["images", "images and state"])
def test_a_memory_sees_what_lerobots_rollout_sees(words: Path, tmp_path: Path, own: bool) -> None:
    memory = {"use_visual_memory": True, "memory_frames": 3, "memory_stride": 2, "use_proprioceptive_memory": own}
    folder = write("pi05", words, tmp_path / "pi05", memory_temporal_attention_every=1, **memory)
    policy = loaded(folder, tokenizer=str(words))
    assert [delta.steps for delta in policy.spec.images[0].delta_timestamps] == [-4, -2, 0]
    assert len(policy.spec.state[0].delta_timestamps) == (3 if own else 1)
    random = np.random.default_rng(0)
    images, states = random.integers(0, 256, (8, 64, 96, 3), dtype=np.uint8), random.normal(size=(8, 7))
    checkpoint, session = policy._checkpoint, policy.start_session()
    assert checkpoint is not None
    checkpoint.policy.reset()  # its queue then takes each observation in turn
    for step in range(8):
        batch: dict[str, Any] = {
            FRONT: torch.from_numpy(np.moveaxis(images[step], -1, -3).copy())[None].float() / 255,
            STATE: torch.from_numpy(states[step].astype(np.float32))[None],
            "task": ["lift the cube"],
        }
        torch.manual_seed(3)
        theirs = checkpoint.after(checkpoint.policy.predict_action_chunk(checkpoint.before(batch)))[0]
        past = [max(0, step - age) for age in (4, 2, 0)]  # the first frame stands in for those before it
        state = states[past] if own else states[step]
        torch.manual_seed(3)
        mine = policy.infer(session, Observation({"front": images[past]}, "lift the cube", 1, {"state": state}))
        if step in (2, 4):  # the first frame itself is due, which cannot be told from one that stands in
            assert np.abs(mine.actions - theirs.double().numpy()).max() < 0.2
        else:
            assert np.array_equal(mine.actions, theirs.double().numpy()), step


@pytest.mark.parametrize("folder", ["act"], indirect=True)
@pytest.mark.parametrize("key", ["action_tokenizer_name", "checkpoint_path"])
def test_other_files_of_a_policy_are_not_downloaded(folder: Path, key: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"{key} is 'org/files' on the hub, but nothing is downloaded"):
        loaded(damaged(folder, tmp_path, **{key: "org/files"}))


@pytest.mark.parametrize("kind", ["act", "diffusion"])
def test_a_checkpoint_without_images_is_served(kind: str, words: Path, tmp_path: Path) -> None:
    policy = loaded(write(kind, words, tmp_path / kind, image=False))
    past = (2, 7) if kind == "diffusion" else (7,)
    message = {"state": np.zeros(past), "environment_state": np.ones(past)}  # and no prompt
    with served(policy) as (_, port), connect(f"ws://127.0.0.1:{port}", proxy=None) as client:
        metadata = unpack(client.recv())
        client.send(pack(message))
        answer = client.recv(60.0)
        assert isinstance(answer, bytes), answer
        assert unpack(answer)["actions"].shape == (policy.spec.horizon, 7)
    assert not metadata["instructed"]
    assert not any(image["required"] for image in metadata["images"].values())


@pytest.mark.parametrize("folder", ["act"], indirect=True)
def test_the_size_of_images_is_known_before_the_first_request(policy: LeRobotPolicy) -> None:
    with served(policy) as (_, port):
        options = ["policy.name:=remote", f"policy.server:=ws://127.0.0.1:{port}"]
        with closing(create(load((), options))) as client:
            client.load()
            assert client.spec.images[0].takes == (64, 96)
            wrong = load((), [*options, 'features.images:=["front = front [64x48]"]'])
            with pytest.raises(ConfigError, match="found 64x48 for 'front', the policy takes 96x64"):
                complete_spec(client.spec, wrong)


@pytest.mark.parametrize("folder", ["smolvla"], indirect=True)
def test_a_request_without_an_instruction_is_refused_where_one_is_needed(policy: LeRobotPolicy) -> None:
    image = np.zeros((64, 96, 3), np.uint8)
    with served(policy) as (_, port), connect(f"ws://127.0.0.1:{port}", proxy=None) as client:
        client.recv()
        client.send(pack({"front": image, "state": np.zeros(7)}))
        assert "no instruction: found ['front', 'state'], expected 'prompt'" in str(client.recv(60.0))


@pytest.mark.parametrize("folder", ["act", "diffusion"], indirect=True)
def test_an_image_of_another_size_is_refused(policy: LeRobotPolicy) -> None:
    asked = observation(policy)
    small = dataclasses.replace(asked, images={"front": asked.images["front"][..., :48, :64, :]})
    with pytest.raises(VlaRosError, match="is 64x48, but the checkpoint was trained on 96x64"):
        policy.infer(policy.start_session(), small)


@pytest.mark.parametrize("folder", ["diffusion", "smolvla"], indirect=True)
def test_the_same_seed_gives_the_same_chunk(folder: Path, words: Path) -> None:
    chunks = []
    for _ in range(2):
        policy = loaded(folder, tokenizer=str(words), seed=4)
        chunks.append(policy.infer(policy.start_session(), observation(policy)))
    assert np.array_equal(chunks[0].actions, chunks[1].actions)
