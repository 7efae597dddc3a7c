import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("zmq", reason="the library zmq is not installed (extra 'remote')")
pytest.importorskip("websockets", reason="the library websockets is not installed (extra 'serve')")

from test.policies.golden import IN_FLOAT32
from vla_ros.config import load
from vla_ros.policies.base import create
from vla_ros.policies.remote.child import ServerProcess
from vla_ros.types import Observation, PreviousChunk


@pytest.mark.timeout(900)
def test_served_chunks_equal_local_chunks(folders, tmp_path):
    options = ["policy.name:=pi", f"policy.checkpoint:={folders['pi05', 'openpi']}", "preset:=libero", *IN_FLOAT32]
    options += ["policy.threads:=1"]  # both processes add in the same order
    local = create(load((), options))
    local.load()
    server = ServerProcess(Path(sys.executable), [word for option in options for word in ("-p", option)])
    try:
        server.start()
        (tmp_path / "key").write_text(server.key)
        remote = create(
            load(
                (),
                ["policy.name:=remote", f"policy.server:={server.url}", "timeouts.inference:=300.0",
                 "policy.connect_timeout:=300.0", f"policy.api_key_file:={tmp_path / 'key'}"],
            )
        )  # fmt: skip
        remote.load()
        assert remote.spec.continues_chunks
        here, there = local.start_session(), remote.start_session()
        draw, rest = np.random.default_rng(0), None
        for delay in (0, 2, 5):
            images = {key: draw.integers(0, 256, (224, 224, 3), dtype=np.uint8) for key in local.spec.image_keys}
            state = {one.key: draw.normal(size=one.size) for one in local.spec.state}
            asked = Observation(images, "pick up the cube", 1, state, noise=draw.normal(size=local.spec.noise))
            free = local.infer(here, asked).actions
            if rest is not None:
                asked = replace(asked, previous=PreviousChunk(rest, delay))
            mine, theirs = local.infer(here, asked), remote.infer(there, asked)
            assert theirs.actions.tobytes() == mine.actions.tobytes()
            assert (rest is None) == np.array_equal(mine.actions, free), "the chunk that is left counts"
            rest = mine.actions[delay:]
        there.close()
        remote.close()
    finally:
        server.close()
        local.close()
