"""Exact statistics, in each family's space and layout."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from test.training.conftest import DATA, FAMILIES, configuration, opened
from vla_ros.policies.base import create
from vla_ros_lab.training import statistics
from vla_ros_lab.training.restated import restate
from vla_ros_models.groot.processing import compose, decompose

SHARED = Path(__file__).parents[3] / "shared" / "golden" / "finetune"
KEYS = ("mean", "std", "min", "max", "q01", "q99")


@pytest.fixture
def golden() -> Any:
    if not SHARED.is_dir():
        pytest.skip("the numbers of published code are not here")
    return np.load(SHARED / "statistics.npz")


def test_statistics_are_those_of_oft_over_all_frames(golden: Any) -> None:
    """LeRobot's mean, deviation and extremes of the merged episodes are the same; its quantiles are not."""
    found = statistics.exact(np.concatenate([golden[f"episode_{index}"] for index in range(3)]).astype(np.float64))
    for key in KEYS:
        np.testing.assert_allclose(found[key], golden[f"oft.{key}"], atol=2e-6, err_msg=key)
    for key in ("mean", "std", "min", "max"):
        np.testing.assert_allclose(found[key], golden[f"lerobot061.merged.{key}"], atol=2e-6, err_msg=key)
    # openpi reads quantiles from 5000 bins between the extremes
    width = (found["max"] - found["min"]) / 5000
    for key in ("q01", "q99"):
        gap = np.abs(found[key] - golden[f"openpi.frames.{key}"])
        assert (gap[:3] < 25 * width[:3] + 1e-6).all()
    assert abs(found["q99"][0] - 1.383) < 1e-3
    assert abs(golden["lerobot061.merged.q99"][0] - found["q99"][0]) > 0.4


def test_quantiles_are_numpy_s_and_leave_padding_out() -> None:
    rng = np.random.default_rng(3)
    values = rng.normal(size=(501, 4, 3))
    values[400:, 2:] = np.nan
    found = statistics.exact(values)
    assert found["mean"].shape == (4, 3)
    np.testing.assert_allclose(found["q99"][3], np.quantile(values[:400, 3], 0.99, axis=0))
    np.testing.assert_allclose(found["std"][0], values[:, 0].std(axis=0))


@pytest.mark.parametrize("name", FAMILIES)
def test_each_family_reads_back_what_is_written(name: str, family: Any, bag: Path, tmp_path: Path) -> None:
    """The data's statistics in the checkpoint's layout are then the ones that it normalises with."""
    config, policy = family(name)
    samples, learned = opened(bag, policy, config), policy.learned()
    found = statistics.of_data(samples, learned)
    content = statistics.in_layout(learned, found, len(samples.data))
    folder = restate(policy.folder, tmp_path / "checkpoint", learned.layout, content)
    more = [f"policy.base_model:={DATA / 'groot' / 'two'}"] if name == "groot" else []
    again = create(configuration(*FAMILIES[name], *more, f"policy.checkpoint:={folder}")).learned()
    for feature, one in (("state", again.state), ("action", again.action)):
        assert (one is None) == (feature not in found)
        for number, (low, high) in enumerate(one.names if one else ()):
            for key, ours in ((low, one.first), (high, one.second)):
                wanted = found[feature][key][..., number]
                wanted = (
                    wanted if ours.ndim == wanted.ndim + 1 else wanted[: len(ours)] if ours.ndim == 2 else wanted
                )
                mine = ours[..., number]
                if mine.ndim > np.ndim(wanted) or not relative(again, number, feature):
                    wanted = np.ravel(wanted)[0]
                np.testing.assert_allclose(mine, wanted, atol=2e-6, err_msg=f"{feature} {number} {key}")


def relative(learned: Any, number: int, feature: str) -> bool:
    if feature == "state" or not learned.parts:
        return False
    flags = [each for _, size, each in learned.parts[1] for _ in range(size)]
    return flags[number]


def test_relative_actions_are_counted_for_each_step_without_padding(bag: Path, family: Any) -> None:
    config, policy = family("groot")
    samples, learned = opened(bag, policy, config), policy.learned()
    found = statistics.actions(samples, learned)
    assert found.shape == (len(samples), samples.spec.horizon, 6)
    ends = [one.stop - 1 for one in samples.episodes]
    assert np.isnan(found[ends, 1:]).all()
    assert np.isfinite(found[:, 0]).all()
    one = samples[3]
    state = one.observation.state["state"]
    np.testing.assert_allclose(
        found[3, :, :5], np.where(one.is_pad[:, None], np.nan, one.actions[:, :5] - state[:5]), atol=1e-6
    )
    np.testing.assert_allclose(found[3, 0, 5], one.actions[0, 5], atol=1e-6)  # the gripper's number is absolute


def test_poses_are_decomposed_as_they_are_composed() -> None:
    rng = np.random.default_rng(1)
    base, goals = rng.normal(size=9), rng.normal(size=(7, 9))
    again = compose(base, decompose(base, compose(base, goals)))
    np.testing.assert_allclose(again, compose(base, goals), atol=1e-5)


def test_openpi_s_and_nvidia_s_layouts(bag: Path, tmp_path: Path) -> None:
    """Their files have other names, and no statistics that the published code does not write."""
    options = [f"policy.checkpoint:={DATA / 'groot' / 'joints'}", f"policy.backbone:={DATA / 'groot' / 'backbone'}"]
    learned = create(configuration(*options)).learned()
    rng = np.random.default_rng(0)
    found = {
        "state": statistics.exact(rng.normal(size=(50, 6))),
        "action": statistics.exact(rng.normal(size=(50, 16, 6))),
    }
    whole: Any = statistics.in_layout(learned, found, 2)
    [(tag, content)] = whole.items()
    assert set(content["relative_action"]) == {"left_arm"}
    assert np.shape(content["relative_action"]["left_arm"]["min"]) == (16, 5)
    assert np.shape(content["action"]["left_hand"]["min"]) == (1,)
    assert np.shape(content["state"]["left_arm"]["q01"]) == (5,)
    folder = restate(DATA / "groot" / "joints", tmp_path / "restated", learned.layout, whole)
    again = create(configuration(f"policy.checkpoint:={folder}", options[1])).learned()
    for key, mine in zip(learned.state.names[0], (again.state.first, again.state.second), strict=True):
        np.testing.assert_allclose(np.ravel(mine)[:5], content["state"]["left_arm"][key], atol=1e-6)
    others = json.loads((DATA / "groot" / "joints" / "statistics.json").read_text()).keys() - {tag}
    assert others <= json.loads((folder / "statistics.json").read_text()).keys(), "other embodiments stay"
