"""Every policy states the middle of its checkpoint's training data, also through a server."""

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("msgpack", reason="the library msgpack is not installed (extra 'serve')")

from vla_ros.contract.spec import ImageFeature, PolicySpec, StateFeature
from vla_ros.policies.remote.spec import decode_spec, encode_spec
from vla_ros.vision.processors import ResizeNaive

pytest.importorskip("torch")

from safetensors.numpy import load_file

from vla_ros.config import build
from vla_ros.policies.base import create
from vla_ros_models.lerobot.checkpoint import read_spec

DATA = Path(__file__).parents[1] / "data"


def spec_of(**options: str) -> PolicySpec:
    return create(build({key.replace("__", "."): value for key, value in options.items()})).describe()


def test_openvla_oft() -> None:
    folder = DATA / "oft" / "libero_l1"
    spec = spec_of(policy__name="oft", policy__checkpoint=str(folder), preset="libero")
    (statistics,) = json.loads((folder / "dataset_statistics.json").read_text()).values()
    low, high = (np.array(statistics["proprio"][name]) for name in ("q01", "q99"))
    np.testing.assert_allclose(spec.state[0].middle, (low + high) / 2)


@pytest.mark.parametrize(("kind", "names"), [("pi0", ("mean",)), ("pi05", ("q01", "q99"))])
def test_pi(kind: str, names: tuple[str, ...]) -> None:
    folder = DATA / "pi" / kind / "openpi"
    path = folder / "assets" / "droid" / "norm_stats.json"
    spec = spec_of(policy__name="pi", policy__checkpoint=str(folder), preset="droid")
    state = json.loads(path.read_text())["norm_stats"]["state"]
    middle = np.mean([state[name] for name in names], axis=0)
    np.testing.assert_allclose(np.concatenate([one.middle for one in spec.state]), middle[:8], atol=1e-6)


def test_lerobot() -> None:
    folder = DATA / "pi" / "pi05" / "lerobot"
    (file,) = folder.glob("policy_preprocessor*.safetensors")
    (state,) = read_spec(folder).state
    np.testing.assert_allclose(state.middle, load_file(file)["observation.state.mean"], atol=1e-6)


def test_a_server_passes_it_on() -> None:
    feature = StateFeature("state", size=3, middle=(3.0, -0.25, 0.5), largest=(3.5, 1.0, 100.0))
    spec = PolicySpec((ImageFeature("image", ResizeNaive((8, 8))),), (feature,))
    sent = json.loads(json.dumps(encode_spec("test", spec)))
    assert decode_spec(sent).state == (feature,)
