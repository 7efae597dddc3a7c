import json
from dataclasses import replace

import numpy as np
import pytest

from test.policies.golden import IN_FLOAT32, edit_json, infer_by_command
from vla_ros.cli.main import main
from vla_ros.config import load
from vla_ros.errors import CheckpointError, ConfigError, VlaRosError
from vla_ros.policies.base import create
from vla_ros.types import Observation, PreviousChunk
from vla_ros_models.pi.processing import find_robot

from .conftest import CASES, DATA, MODELS

CHUNK = 5e-5
LIBERO = {"observation/image": "image_base", "observation/wrist_image": "image_left_wrist"}


def make(folder, *options, preset="libero"):
    chosen = ["policy.name:=pi", f"policy.checkpoint:={folder}", f"preset:={preset}"]
    return create(load((), [*chosen, *IN_FLOAT32, *options]))


@pytest.mark.parametrize("number", range(6))
@pytest.mark.parametrize("kind", MODELS)
def test_presets_reproduce_openpis_chunks(tmp_path, folders, kind, number):
    case = CASES[kind][number]
    robot = find_robot(case.text("robot"))
    present = dict(zip(robot.image_keys, robot.images, strict=True))
    images = {key: case.images[name] for key, name in present.items() if name in case.images}
    if robot.name == "libero":  # the preset's cameras are upside down
        images = {key: np.rot90(image, 2) for key, image in images.items()}
    starts = np.cumsum([0, *(size for _, size in robot.state_keys)])
    states = {
        key: case["state"][start : start + size]
        for (key, size), start in zip(robot.state_keys, starts[:-1], strict=True)
    }
    words = [f"preset:={robot.name}"]
    folder, prompt = folders[kind, "openpi"], case.text("prompt")
    answer = infer_by_command(folder, tmp_path, prompt, images, states, case["noise"], words)
    np.testing.assert_allclose(answer["actions"], case["actions"], rtol=0, atol=CHUNK)


@pytest.mark.parametrize("kind", MODELS)
def test_lerobots_layout_needs_no_robot(tmp_path, folders, kind):
    case = CASES[f"{kind}_lerobot"][0]
    images = {key.removeprefix("observation.images."): image for key, image in case.images.items()}
    folder, states = folders[kind, "lerobot"], {"state": case["state"]}
    answer = infer_by_command(folder, tmp_path, case.text("prompt"), images, states, case["noise"])
    np.testing.assert_allclose(answer["actions"], case["actions"], rtol=0, atol=CHUNK)


@pytest.fixture
def policy(folders):
    loaded = make(folders["pi05", "openpi"], "policy.seed:=7")
    loaded.load()
    yield loaded
    loaded.close()


def observation(seed=0, **changes):
    draw = np.random.default_rng(seed)
    values = {
        "images": {key: draw.integers(0, 256, (224, 224, 3), dtype=np.uint8) for key in LIBERO},
        "instruction": "pick up the red cube",
        "stamp": seed,
        "state": {"observation/state": draw.normal(size=8)},
    }
    return Observation(**{**values, **changes})


def test_an_episode_repeats_with_its_seed(policy):
    session, other = policy.start_session(), policy.start_session()
    first, second = (policy.infer(session, observation()).normalized for _ in range(2))
    assert np.abs(first - second).max() > 0.1, "every chunk has noise of its own"
    np.testing.assert_array_equal(policy.infer(other, observation()).normalized, first)
    session.reset()
    np.testing.assert_array_equal(policy.infer(session, observation()).normalized, first)


@pytest.mark.parametrize(
    ("kind", "layout", "robot", "rtc"),
    [("pi05", "openpi", "libero", "guided"), ("pi05", "openpi", "libero", "jacobian"),
     ("pi0", "openpi", "aloha", "auto"), ("pi05", "lerobot", "", "trained")],
)  # fmt: skip
def test_a_chunk_continues_the_executed_chunk(checkpoint, kind, layout, robot, rtc):
    folder = checkpoint(kind, layout)
    if rtc == "trained":
        edit_json(folder / "config.json", lambda config: config.update(rtc_training_max_delay=4))
    policy = make(folder, f"policy.rtc:={rtc}", preset=robot)
    policy.load()
    assert policy.spec.continues_chunks
    size, state = policy.spec.state[0].size, policy.spec.state[0].key
    images = {
        key: np.full((224, 224, 3), 50 * number, np.uint8) for number, key in enumerate(policy.spec.image_keys)
    }
    asked = observation(images=images, state={state: np.full(size, 0.4)})
    session = policy.start_session()
    before = policy.infer(session, asked).actions
    moved = replace(asked, state={state: np.full(size, 0.45)})
    spread = policy.loaded.processing.actions

    def distance(chunk, rest, delay):  # of the actions that are already fixed, in the model's units
        ends = [spread.normalize(actions[:delay]) for actions in (chunk.actions, rest)]
        return np.abs(ends[0] - ends[1]).max()

    rest, free = before[3:], policy.infer(session, moved)
    session.answered = 1
    chunk = policy.infer(session, replace(moved, previous=PreviousChunk(rest, 3)))
    tolerance = 1e-5 if rtc == "trained" else 0.25
    assert distance(chunk, rest, 3) < tolerance < distance(free, rest, 3)
    session.answered = 1
    late = policy.infer(session, replace(moved, previous=PreviousChunk(rest, 5)))  # longer than it was trained for
    assert distance(late, rest, 5) < 0.25
    brief = []  # two ways to say that one more action guides the chunk
    for previous in (PreviousChunk(rest, 3, guided=1), PreviousChunk(rest[:4], 3)):
        session.answered = 1
        brief.append(policy.infer(session, replace(moved, previous=previous)).actions)
    np.testing.assert_array_equal(*brief)
    assert np.array_equal(brief[0], chunk.actions) == (rtc == "trained")
    empty = replace(moved, previous=PreviousChunk(before[:0], 0))
    session.answered = 1
    np.testing.assert_array_equal(policy.infer(session, empty).actions, free.actions)
    with pytest.raises(ConfigError, match="previous actions have shape"):
        policy.infer(session, replace(moved, previous=PreviousChunk(rest[:, :3], 1)))


def test_an_invalid_request_does_not_affect_the_batch(policy):
    good = [observation(seed) for seed in range(2)]
    bad = {
        "is None, expected 8 finite": observation(state={}),
        "nan.*expected 8 finite": observation(state={"observation/state": np.full(8, np.nan)}),
        "no image": observation(images={}),
        "instruction": observation(instruction=" "),
    }
    sessions = [policy.start_session() for _ in range(6)]
    answers = policy.infer_batch(list(zip(sessions, [*good, *bad.values()], strict=True)))
    for seed, answer in enumerate(answers[:2]):
        alone = policy.infer(policy.start_session(), observation(seed))
        np.testing.assert_allclose(answer.normalized, alone.normalized, rtol=0, atol=1e-4)
        assert answer.stamp == seed
    for (message, _), answer in zip(bad.items(), answers[2:], strict=True):
        with pytest.raises(VlaRosError, match=message):
            raise answer


def test_the_checkpoint_says_how_a_chunk_continues(checkpoint):
    folder = checkpoint("pi05", "lerobot")
    values = {
        "enabled": True,
        "execution_horizon": 2,
        "prefix_attention_schedule": "ONES",
        "max_guidance_weight": 4.0,
    }
    edit_json(folder / "config.json", lambda config: config.update(rtc_config=values, n_action_steps=6))
    told = make(folder)
    same = (
        "policy.rtc:=guided",
        "policy.rtc_horizon:=2",
        "policy.rtc_schedule:=ones",
        "policy.rtc_max_guidance:=4",
    )
    chunks = []
    for policy in (told, make(folder, *same), make(folder, "policy.rtc_max_guidance:=9")):
        policy.load()
        case = CASES["pi05_lerobot"][0]
        images = {key.removeprefix("observation.images."): image for key, image in case.images.items()}
        asked = observation(
            images=images, state={"state": case["state"].astype(float)}, previous=PreviousChunk(np.ones((5, 7)), 1)
        )
        chunks.append(policy.infer(policy.start_session(), asked).actions)
    np.testing.assert_array_equal(chunks[0], chunks[1])
    assert np.abs(chunks[0] - chunks[2]).max() > 1e-3, "the options count more than the checkpoint"
    assert told.spec.execute_steps == 6


def test_the_spec_has_the_names_of_openpis_server(policy, folders):
    assert make(folders["pi05", "openpi"]).describe() == policy.spec, "known without loading weights"
    assert policy.spec.image_keys == tuple(LIBERO)
    assert [(one.key, one.size) for one in policy.spec.state] == [("observation/state", 8)]
    assert (policy.spec.horizon, policy.spec.dimension, policy.spec.noise) == (10, 7, (10, 32))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("policy.robot:=atlas", "'atlas'"),
        ("policy.tokenizer:=/nowhere", "no tokenizer"),
        ("policy.asset:=mine", "mine"),
        ("policy.device:=tpu", "policy.device"),
        ("policy.rtc:=trained", "was not trained for it"),
        ("preset:=bridge", "does not state the checkpoint's robot"),
    ],
)
def test_options_that_do_not_fit_are_refused(folders, options, message):
    with pytest.raises((CheckpointError, ConfigError), match=message):
        make(folders["pi05", "openpi"], options).load()


def test_a_model_that_ignores_its_images_is_refused(checkpoint, monkeypatch):
    def blind(self, images, ops):
        return self.embed_tokens.weight.new_zeros(len(images), 256, 64)

    monkeypatch.setattr("vla_ros_models.pi.network.PiNetwork.encode", blind)
    with pytest.raises(CheckpointError, match="does not see"):
        make(checkpoint()).load()


def test_replay_runs_it(tmp_path, folders):
    options = ["policy.name:=pi", f"policy.checkpoint:={folders['pi05', 'lerobot']}"]
    options += ["features.state:=['state = unused[8]']", "features.images:=['image = image']"]
    options += ["features.action:=['arm.tip_delta', 'arm.gripper']"]
    words = [word for option in options for word in ("-p", option)]
    file = tmp_path / "out.json"
    # The status says what is wrong with actions of random weights.
    main(["replay", str(DATA.parent / "bags" / "mcap_jpeg"), "--json", str(file), *words, "--no-trials"])
    assert json.loads(file.read_text())["frames"]["used"] == 30
