"""What LIBERO sends through vla-eval, and what it executes, compared with the published evaluation."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

pytest.importorskip("vla_eval", reason="the library vla-eval is not installed (extra 'dev')")
pytest.importorskip("prometheus_client", reason="the library prometheus_client is not installed (extra 'serve')")

from vla_eval.connection import Connection

from test.serve.serving import PATIENCE, served

from .conftest import cases, make_policy


@pytest.mark.parametrize("variant", ["libero_l1"])
def test_a_benchmark_gets_the_published_actions_row_by_row(variant):
    async def rows(port, case):
        connection = Connection(f"ws://127.0.0.1:{port}/vla-eval", timeout=PATIENCE)
        await connection.connect(benchmark="vla_eval.benchmarks.libero.benchmark:LIBEROBenchmark")
        await connection.start_episode({"task": {"name": str(case["instruction"])}})
        # LIBEROBenchmark.make_obs turns the images, which the cameras deliver upside down
        images = {"agentview": case["image_0"][::-1, ::-1]}
        if "image_1" in case:
            images["wrist"] = case["image_1"][::-1, ::-1]
        observation = {"images": images, "task_description": str(case["instruction"])}
        if "proprio" in case:
            observation["states"] = case["proprio"]
        found = [(await connection.act(observation))["actions"] for _ in case["action"]]
        await connection.close()
        return np.array(found)

    with served(make_policy(variant)) as (_, port):
        for case in cases(variant)[:2]:
            found = asyncio.run(rows(port, case))
            np.testing.assert_allclose(found[:, :6], case["action"][:, :6], rtol=0, atol=1e-4)
            gripper = -np.sign(2 * case["action"][:, 6] - 1)  # run_libero_eval: normalised, binarised, inverted
            np.testing.assert_array_equal(found[:, 6], gripper)
