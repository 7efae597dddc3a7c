import numpy as np
import pytest

pytest.importorskip("torch", reason="the library torch is not installed (extra 'openvla')")
pytest.importorskip("zmq", reason="the library zmq is not installed (extra 'remote')")

from vla_ros.config import load
from vla_ros.config.files import config_file
from vla_ros.policies.base import create
from vla_ros.types import Observation, RawImage

from .serving import served


def test_the_demos_checkpoint_answers_with_the_same_bits() -> None:
    demo = [config_file("demo")]
    local = create(load(demo, ["policy.self_test:=false"]))
    local.load()
    generator = np.random.default_rng(0)
    with served(create(load(demo, ["policy.self_test:=false"]))) as (_, port):
        words = ["policy.name:=remote", f"policy.server:=ws://127.0.0.1:{port}", "timeouts.inference:=60.0"]
        remote = create(load((), words))
        remote.load()
        here, there = local.start_session(), remote.start_session()
        for size in ((224, 224), (96, 128), (480, 640)):
            image = generator.integers(0, 256, (*size, 3), dtype=np.uint8)
            text, raw = "pick up the red cube", {"image": RawImage(image)}
            resized = local.spec.processors["image"](image)
            mine = local.infer(here, Observation({"image": resized}, text, 1, raw_images=raw))
            theirs = remote.infer(there, Observation({"image": image}, text, 1))
            assert theirs.actions.tobytes() == mine.actions.tobytes()
            assert theirs.normalized is not None
            assert mine.normalized is not None
            assert theirs.normalized.tobytes() == mine.normalized.tobytes()
            np.testing.assert_array_equal(theirs.tokens, mine.tokens)
        there.close()
    local.close()
