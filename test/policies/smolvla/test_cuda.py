import numpy as np
import pytest

from test.policies.golden import GPU, eager_and_graphs
from test.policies.smolvla.conftest import CASES, DATA, infer, load_folder, request
from vla_ros.types import RawImage

pytestmark = GPU


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
def test_chunks_equal_lerobots(name, dtype, caplog):
    cases = CASES[name][:3]
    model = load_folder(DATA / cases[0].folder, "cuda", dtype)
    assert "torch computes the layers" not in caplog.text
    for case in cases:
        asked = request(model, case)
        graph = model.processing.shown_actions(eager_and_graphs(model, asked))
        error = np.abs(graph - case["actions_normalized"])
        assert error.max() < (1e-4 if dtype == "float32" else 0.3)  # autocast costs LeRobot 0.04
        size, processor = model.engine._size, model.processing.processor
        raw = {key: RawImage(image, processor=processor(size)) for key, image in case.images.items()}
        again = model.request(raw, case["state"], str(case["prompt"]), case["noise"], case.rtc)
        [device] = infer(model, again)
        np.testing.assert_array_equal(device, graph)
    model.engine.close()


@pytest.mark.parametrize("size", [2, 4])
def test_a_batch_equals_single_requests(size):
    cases = (CASES["default"] + CASES["default_rtc"])[:size]
    model = load_folder(DATA / "default", "cuda", "float32")
    for _ in range(2):
        for chunk, case in zip(infer(model, *(request(model, case) for case in cases)), cases, strict=True):
            np.testing.assert_allclose(chunk, case["actions_normalized"], rtol=0, atol=1e-4)
        assert model.engine.wait(120)
    model.engine.close()


def test_guidance_along_the_gradient_equals_the_cpus():
    case, chunks = CASES["default_rtc"][-1], []
    for device in ("cpu", "cuda"):
        model = load_folder(DATA / "default", device, "float32", jacobian=True)
        chunks.append(infer(model, request(model, case))[0])
        model.engine.close()
    np.testing.assert_allclose(chunks[1], chunks[0], rtol=0, atol=1e-4)
