import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from vla_ros.errors import CheckpointError, ConfigError
from vla_ros_models.normalization import LEROBOT_EPS, make_normalization
from vla_ros_models.pi.processing import (
    ROBOTS,
    PromptForm,
    add_state,
    aloha_actions,
    aloha_state,
    find_robot,
    override,
    prompt_parts,
    prompt_tokens,
    state_bins,
)

numbers = st.floats(-3, 3, width=32)
STATISTICS = {"mean": [0.5, -1.0], "std": [2.0, 0.1], "q01": [-1.0, 0.0], "q99": [1.0, 4.0]}


def test_state_bins_at_their_edges():
    edges = np.array([-1.0000001, -1.0, -0.9921876, -0.9921875, 0.0, 0.9921874, 0.9921875, 1.0, 7.0])
    assert state_bins(edges).tolist() == [-1, 0, 0, 1, 128, 254, 255, 255, 255]


@given(arrays(np.float64, 8, elements=st.integers(-3000, 3000).map(lambda number: number / 1000)))
def test_state_bins_are_uniform(state):
    expected = np.where(state < -1, -1, np.minimum(np.floor((state + 1) * 128), 255))
    np.testing.assert_array_equal(state_bins(state), expected)


def test_prompt_texts():
    state = np.array([-1.5, 0.0, 0.5])
    text = "  Open the_top\ndrawer "
    line = PromptForm(48)
    assert prompt_parts(text, line, state) == ("Open the top drawer", "\n")
    assert prompt_parts(text, PromptForm(48, clean=False), state) == (f"{text}\n",)
    assert prompt_parts("fold\n", PromptForm(48, clean=False), state) == ("fold\n",)
    sentence = PromptForm(200, state="as_is")
    assert prompt_parts(text, sentence, state) == ("Task: Open the top drawer, State: -1 128 192;\nAction: ",)
    padded = PromptForm(200, state="padded", padded_state=5)
    assert prompt_parts("go", padded, state) == ("Task: go, State: -1 128 192 128 128;\nAction: ",)


def test_long_prompts_are_truncated_and_empty_ones_refused():
    ids = prompt_tokens(lambda text: [ord(letter) for letter in text], "a" * 60, PromptForm(48), np.zeros(1))
    assert ids.tolist() == [2] + [97] * 47
    with pytest.raises(ConfigError, match="empty"):
        prompt_tokens(lambda text: [], "  \n", PromptForm(48), np.zeros(1))


@pytest.mark.parametrize("eps", [None, LEROBOT_EPS])
@pytest.mark.parametrize("form", ["z_score", "quantile", "none"])
@given(values=arrays(np.float64, (3, 2), elements=numbers))
def test_unnormalize_inverts_normalize(form, eps, values):
    normalization = make_normalization(form, STATISTICS, "here", eps)
    back = normalization.unnormalize(normalization.normalize(values))
    np.testing.assert_allclose(back, values, rtol=0, atol=3e-6)


def test_quantiles_are_exact_at_the_first_percentile():
    low = np.array([-0.883754, 0.123])
    for eps in (None, LEROBOT_EPS):
        normalization = make_normalization("quantile", {"q01": low, "q99": low + 1.7}, "here", eps)
        assert normalization.normalize(low).tolist() == [-1, -1]
        assert state_bins(normalization.normalize(low)).tolist() == [0, 0]


def test_epsilons():
    openpi = make_normalization("z_score", {"mean": [0.0], "std": [0.0]}, "here")
    assert openpi.normalize(np.array([1e-6])).tolist() == [1.0]
    assert openpi.unnormalize(np.array([1.0])).tolist() == [1e-6]
    lerobot = make_normalization("z_score", {"mean": [3.0], "std": [0.0]}, "here", LEROBOT_EPS)
    assert lerobot.unnormalize(np.array([5.0])).tolist() == [3.0]
    flat = make_normalization("quantile", {"q01": [1.0], "q99": [1.0]}, "here", LEROBOT_EPS)
    assert np.isfinite(flat.normalize(np.array([1.0]))).all()


def test_statistics_of_another_length():
    normalization = make_normalization("z_score", STATISTICS, "here")
    assert normalization.normalize(np.array([2.5, -1.0, 9.0]))[2] == 9.0
    assert normalization.normalize(np.array([2.5])).shape == (1,)


@pytest.mark.parametrize(
    ("form", "change", "message"),
    [
        ("quantile", {"q99": None}, r"no \['q99'\]"),
        ("z_score", {"std": [1.0, -1.0]}, "std >= 0"),
        ("z_score", {"mean": [], "std": []}, "expected equal ones"),
    ],
)
def test_invalid_statistics_are_refused(form, change, message):
    statistics = {key: value for key, value in {**STATISTICS, **change}.items() if value is not None}
    with pytest.raises(CheckpointError, match=f"file: state.*{message}"):
        make_normalization(form, statistics, "file: state")


@given(arrays(np.float64, (4, 7), elements=numbers), arrays(np.float64, 7, elements=numbers))
def test_delta_actions(actions, state):
    mask = ROBOTS["libero"].delta["pi0"]
    absolute = add_state(actions, state, mask)
    np.testing.assert_array_equal(absolute[:, 6], actions[:, 6])
    np.testing.assert_allclose(absolute[:, :6] - state[:6], actions[:, :6], atol=1e-6)
    np.testing.assert_allclose(add_state(absolute, -state, mask), actions, atol=1e-6)


def test_alohas_arms():
    state = np.array([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 1.0])
    decoded = aloha_state(state)
    np.testing.assert_array_equal(decoded[:6], [0.1, -0.2, -0.3, 0.4, 0.5, 0.6])
    closed, opened = decoded[6], decoded[13]
    # The angle of a horn of 22 mm that moves a finger by an arm of 36 mm, on openpi's scale.
    for share, found in ((0.0, closed), (1.0, opened)):
        finger = share * 0.03956 + 0.01844
        angle = np.arcsin(np.clip((0.022**2 + finger**2 - 0.036**2) / (2 * 0.022 * finger), -1, 1))
        assert found == pytest.approx((angle - 0.5476) / 1.082)
    actions = aloha_actions(np.zeros((3, 14)))
    assert actions[:, 6] == pytest.approx((0.5476 + 0.6213) / 2.1123)
    assert state[6] == 0.0, "the caller's array is not changed"


def test_robots_are_consistent():
    for name, robot in ROBOTS.items():
        assert robot.name == name
        assert set(robot.optional_images) < set(robot.images)
        assert all(len(mask) == robot.actions <= robot.state for mask in robot.delta.values())
    sim = ROBOTS["aloha_sim"]
    assert (sim.adapt, dict(sim.delta)) == (True, {}), "converted as the real arms are, but absolute"
    with pytest.raises(ConfigError, match="'so101'"):
        find_robot("so101")


@pytest.mark.parametrize(("kind", "layout", "robot"), [("pi0", "openpi", "libero"), ("pi05", "openpi", "aloha")])
def test_model_actions_invert_robot_actions(loaded, kind, layout, robot):
    processing = loaded(kind, layout, robot).processing
    generator = np.random.default_rng(4)
    before, now = generator.uniform(0, 1, (2, processing.state_size))
    rest = generator.normal(size=(6, 32))
    meant = processing.robot_actions(rest, before)
    again = processing.model_actions(meant, now)
    np.testing.assert_allclose(processing.robot_actions(again, now), meant, rtol=0, atol=2e-6)
    np.testing.assert_allclose(
        processing.model_actions(meant, before), rest[:, : again.shape[1]], rtol=0, atol=2e-5
    )
    assert (np.abs(again - rest[:, : again.shape[1]]).max() > 0.1) == bool(processing.delta)


def test_override_sets_prompt_state_and_resize(loaded):
    processing = loaded("pi05", "lerobot").processing
    assert override(processing) == processing
    changed = override(processing, prompt_state="padded", resize="antialias")
    assert (changed.prompt.state, changed.antialias) == ("padded", True)
    encoded = changed.tokens(lambda text: [len(text)], "go", np.zeros(8))
    assert encoded.tolist() == [2, len("Task: go, State: " + " ".join(["128"] * 32) + ";\nAction: ")]
