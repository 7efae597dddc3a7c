"""The demo's checkpoint through the wire: the same bits as in one process."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest

pytest.importorskip("torch", reason="the library torch is not installed (extra 'openvla')")
pytest.importorskip("zmq", reason="the library zmq is not installed (extra 'remote')")

from vla_ros.config import load
from vla_ros.config.files import config_file
from vla_ros.policies.base import create
from vla_ros.serve import server
from vla_ros.serve.service import Limits, Service
from vla_ros.types import Observation, RawImage

PATIENCE = 60.0


@pytest.mark.slow
def test_the_demos_checkpoint_answers_with_the_same_bits() -> None:
    demo = [config_file("demo")]
    local = create(load(demo, ["policy.self_test:=false"]))
    service = Service(create(load(demo, ["policy.self_test:=false"])), "openvla", Limits())
    service.load()
    local.load()
    loop, stop, ready = asyncio.new_event_loop(), asyncio.Event(), threading.Event()
    ports: list[int] = []

    async def listen() -> None:
        async with server.listening(service, server.Address(port=0)) as listener:
            ports.append(next(iter(listener.sockets)).getsockname()[1])
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(listen()))
    thread.start()
    assert ready.wait(PATIENCE)
    remote = create(load((), ["policy.name:=remote", f"policy.server:=ws://127.0.0.1:{ports[0]}"]))
    try:
        remote.load()
        here, there = local.start_session(), remote.start_session()
        generator = np.random.default_rng(0)
        for size in ((224, 224), (96, 128), (480, 640)):
            image = generator.integers(0, 256, (*size, 3), dtype=np.uint8)
            resized = local.spec.processors["image"](image)
            text = "pick up the red cube"
            mine = local.infer(
                here, Observation({"image": resized}, text, 1, raw_images={"image": RawImage(image)})
            )
            theirs = remote.infer(there, Observation({"image": image}, text, 1))
            assert theirs.actions.tobytes() == mine.actions.tobytes()
            assert theirs.normalized is not None
            assert mine.normalized is not None
            assert theirs.normalized.tobytes() == mine.normalized.tobytes()
            np.testing.assert_array_equal(theirs.tokens, mine.tokens)
        there.close()
    finally:
        remote.close()
        loop.call_soon_threadsafe(stop.set)
        thread.join(PATIENCE)
        loop.close()
        service.close(PATIENCE)
        local.close()
