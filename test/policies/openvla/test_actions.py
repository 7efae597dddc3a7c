import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vla_ros.errors import CheckpointError, ConfigError
from vla_ros_models.openvla.processing import ActionBins, choose, read_dataset_statistics

BINS = ActionBins(32000)


def test_the_published_code_gives_the_same_actions(data):
    statistics = read_dataset_statistics(data)
    for case in json.loads((data / "cases.json").read_text()):
        normalized = BINS.decode(case["tokens"])
        np.testing.assert_array_equal(normalized, case["normalized"])
        np.testing.assert_allclose(statistics["alpha"].unnormalize(normalized), case["action_alpha"], atol=1e-12)
        np.testing.assert_allclose(statistics["beta"].unnormalize(normalized), case["action_beta"], atol=1e-12)


def test_centres_lie_between_the_edges_and_have_one_token_each():
    assert BINS.centers.shape == (255,)
    np.testing.assert_allclose(BINS.centers[[0, 127, 254]], [-1 + 1 / 255, 0, 1 - 1 / 255], atol=1e-15)
    tokens = BINS.encode(BINS.centers)
    np.testing.assert_array_equal(BINS.indices(tokens), np.arange(255))
    assert BINS.outside(tokens) == 0


def test_tokens_count_down_from_the_end_of_the_unpadded_vocabulary():
    tokens = [32063, 32000, 31999, 31998, 31745, 31744, 31743, 5]
    np.testing.assert_array_equal(BINS.indices(tokens), [0, 0, 0, 1, 254, 254, 254, 254])
    assert BINS.outside(tokens) == 4
    assert np.abs(ActionBins(32064).decode([31900]) - BINS.decode([31900])) > 0.4


def test_bins_are_computed_once_and_read_only():
    assert BINS.centers is BINS.centers
    with pytest.raises(ValueError, match="read-only"):
        BINS.centers[0] = 0.0


@given(st.lists(st.floats(-1.5, 1.5), min_size=1, max_size=7))
def test_decoding_inverts_encoding_within_half_a_bin(values):
    decoded = BINS.decode(BINS.encode(values))
    assert np.abs(decoded - np.clip(values, -1, 1)).max() <= 1 / 255 + 1e-12


def test_masked_entries_are_not_normalised(data):
    statistics = read_dataset_statistics(data)["alpha"]
    normalized = np.full(7, 0.25)
    actions = statistics.unnormalize(normalized)
    assert actions[6] == 0.25
    assert actions[0] == pytest.approx(0.5 * 1.25 * 0.08 - 0.03)
    np.testing.assert_allclose(statistics.normalize(actions), normalized)
    assert read_dataset_statistics(data)["beta"].mask.all()


def test_a_key_is_needed_for_several_datasets_and_must_be_known(data):
    statistics = read_dataset_statistics(data)
    assert choose({"beta": statistics["beta"]}, "").key == "beta"
    with pytest.raises(ConfigError, match=r"unnorm_key: not set.*2 datasets.*\['alpha', 'beta'\]"):
        choose(statistics, "")
    with pytest.raises(ConfigError, match=r"no dataset 'alhpa'; it has .*beta.*did you mean 'alpha'\?"):
        choose(statistics, "alhpa")
    alpha = statistics["alpha"]
    both = {"libero_spatial_no_noops": alpha, "other": alpha}  # a suite finds its filtered dataset
    assert choose(both, "libero_spatial") is alpha
    with pytest.raises(ConfigError):
        choose(both, "libero_goal")


def test_dataset_statistics_override_norm_stats(tmp_path):
    entry = {"action": {"q01": [0, 0], "q99": [1, 2]}}
    (tmp_path / "config.json").write_text(json.dumps({"norm_stats": {"base": entry}}))
    assert list(read_dataset_statistics(tmp_path)) == ["base"]
    (tmp_path / "dataset_statistics.json").write_text(json.dumps({"mine": entry}))
    assert list(read_dataset_statistics(tmp_path)) == ["mine"]


def deep(count):
    return [deep(count - 1)] if count else [0.0]


@pytest.mark.parametrize(
    ("statistics", "words"),
    [
        ({}, "no action statistics"),
        ({"a": {}}, r"action of 'a': no \['q01', 'q99'\]"),
        ({"a": {"action": {"q01": [0], "q99": [1, 2]}}}, "expected equal ones"),
        ({"a": {"action": {"q01": [0], "q99": [1], "mask": [True, False]}}}, "mask has the shape"),
        ({"a": {"action": {"q01": [2.0], "q99": [1.0]}}}, "q99 >= q01"),
        ({"a": {"action": {"q01": [float("nan")], "q99": [1.0]}}}, "finite"),
        ({"a": {"action": {"q01": ["x"], "q99": [1.0]}}}, "q01: found .*expected a list of numbers"),
        ({"a": {"action": {"q01": [10**400], "q99": [1.0]}}}, "q01: found .*expected a list of numbers"),
        ({"a": {"action": {"q01": deep(900), "q99": [1.0]}}}, "q01: found .*expected a list of numbers|too deeply"),
        ({"a": {"action": {"q01": [True], "q99": [True]}}}, "q01: found .True., expected a list of numbers"),
        (
            {"a": {"action": {"q01": [0], "q99": [1], "mask": ["false"]}}},
            "mask: found ..false.., expected a list of true",
        ),
        ({"a": {"action": {"q01": [0], "q99": [1], "scale": 2.0}}}, "'a': found scale: 2.0"),
        ({"a": {"action": {"q01": [0], "q99": [1]}, "normalization": "z"}}, "'a': found normalization: 'z'"),
        ({"a": [1]}, "'a': found .1., expected a JSON object"),
    ],
)
def test_damaged_statistics_are_refused(tmp_path, statistics, words):
    (tmp_path / "dataset_statistics.json").write_text(json.dumps(statistics))
    with pytest.raises(CheckpointError, match=words):
        choose(read_dataset_statistics(tmp_path), "")


def test_statistics_that_contradict_each_other_are_reported(tmp_path, caplog):
    sound = {"q01": [0.0, -1.0], "q99": [1.0, 1.0], "min": [-0.5, -1.0], "max": [1.5, 1.0], "mean": [0.5, 0.0]}
    (tmp_path / "dataset_statistics.json").write_text(json.dumps({"a": {"action": {**sound, "std": [0.3, 0.5]}}}))
    assert list(read_dataset_statistics(tmp_path)["a"].high) == [1.0, 1.0]
    assert not caplog.messages
    for change, words in (
        ({"mean": [0.5, 7.0]}, "number 1 has mean 7 and max 1"),
        ({"min": [0.4, -1.0]}, "number 0 has min 0.4 and q01 0"),
        ({"std": [0.3, 1.5]}, "number 1 has std 1.5, but min and max are only 2 apart"),
    ):
        caplog.clear()
        (tmp_path / "dataset_statistics.json").write_text(json.dumps({"a": {"action": {**sound, **change}}}))
        assert list(read_dataset_statistics(tmp_path)["a"].low) == [0.0, -1.0]
        assert words in caplog.text


def test_two_files_with_other_bounds_of_one_data_set_are_reported(tmp_path, caplog):
    entry = {"action": {"q01": [0.0], "q99": [1.0]}}
    for name, content in (("dataset_statistics", {"a": entry}), ("config", {"norm_stats": {"a": entry}})):
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    read_dataset_statistics(tmp_path)
    assert not caplog.messages
    (tmp_path / "config.json").write_text(
        json.dumps({"norm_stats": {"a": {"action": {"q01": [0.0], "q99": [2.0]}}}})
    )
    assert read_dataset_statistics(tmp_path)["a"].high == [1.0]
    assert "q99 of 'a' differs from dataset_statistics.json, whose value is used" in caplog.text


def test_a_damaged_set_is_no_concern_of_another(tmp_path):
    sound, broken = {"q01": [0.0], "q99": [1.0]}, {"q01": [float("nan")], "q99": [1.0]}
    (tmp_path / "dataset_statistics.json").write_text(
        json.dumps({"broken": {"action": broken}, "sound": {"action": sound}})
    )
    statistics = read_dataset_statistics(tmp_path)
    assert choose(statistics, "sound").high == [1.0]
    assert list(statistics.readable()) == ["sound"]
    with pytest.raises(ConfigError, match=r"trained on 2 datasets.*\['broken', 'sound'\]"):
        choose(statistics, "")
    with pytest.raises(CheckpointError, match="finite numbers"):
        choose(statistics, "broken")
