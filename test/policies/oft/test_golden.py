import numpy as np
import pytest
import torch

from vla_ros_models.convert import convert
from vla_ros_models.engine import decoder
from vla_ros_models.engine.ops import Ops
from vla_ros_models.engine.weights import fuse
from vla_ros_models.oft import inference
from vla_ros_models.oft.inference import ChunkRequest, make_chunk_engine
from vla_ros_models.oft.network import plan_sequence
from vla_ros_models.openvla.prompt import close_prompt

from .conftest import DATA, answer, cases, loaded, observe

BOUND = {"libero_l1": 1e-4, "aloha_film": 1e-4, "libero_diffusion": 1e-3}


@pytest.mark.parametrize("path", ["reference", "engine", "converted"])
@pytest.mark.parametrize("variant", BOUND)
def test_chunks_of_the_published_code(variant, path, tmp_path):
    folder = None
    if path == "converted":
        convert(DATA / variant, folder := tmp_path / "safetensors")
        assert not list(folder.glob("*.pt"))
    for case in cases(variant)[: 1 if path == "converted" else None]:
        options = {"denoising_steps": int(case["steps"])} if "steps" in case else {}
        policy = loaded(variant, folder, self_test=False, unnorm_key=str(case["unnorm_key"]), **options)
        if path == "engine":  # its torch operations, padded sequences and fused weights
            model = policy.loaded.model
            engine = make_chunk_engine(model, ops=Ops(), steps=options.get("denoising_steps", 50))
            object.__setattr__(policy.loaded, "engine", engine)
        seen = observe(policy, variant, case)
        for index, key in enumerate(policy.spec.image_keys):
            np.testing.assert_array_equal(seen.images[key][::9, ::7], case[f"cropped_{index}_probe"])
        ids = policy.loaded.prompt.encode(seen.instruction)
        empty = policy.loaded.model.architecture.empty_token
        np.testing.assert_array_equal(ids, close_prompt(list(case["input_ids"]), empty))
        chunk = answer(policy, variant, case)
        np.testing.assert_allclose(chunk.normalized, case["normalized"], atol=BOUND[variant])
        np.testing.assert_allclose(chunk.actions, case["action"], atol=2 * BOUND[variant])
        assert chunk.actions.shape == (policy.spec.horizon, policy.spec.dimension)
        policy.close()


def _causal(weights, ops, cache, sequence, wanted, mask):
    return decoder.hidden_states(weights, ops, sequence).flatten(0, 1)[wanted]


def _shifted(layout, *sizes):
    made = plan_sequence(layout, *sizes)
    return made._replace(wanted=made.wanted + 1)


@pytest.mark.parametrize(("name", "mistake"), [("parallel", _causal), ("plan_sequence", _shifted)])
def test_causal_attention_and_shifted_states_fail(monkeypatch, name, mistake):
    policy, case = loaded("libero_l1", self_test=False), cases("libero_l1")[0]
    monkeypatch.setattr(inference, name, mistake)
    chunk = answer(policy, "libero_l1", case)
    assert np.abs(chunk.normalized - case["normalized"]).max() > 0.05


@pytest.mark.parametrize("variant", sorted(BOUND))
def test_padding_and_other_robots_change_nothing(variant):
    policy, rng = loaded(variant, self_test=False, denoising_steps=5), np.random.default_rng(1)
    model, layout, asked = policy.loaded.model, policy.loaded.model.layout, []
    engine = make_chunk_engine(model, weights=fuse(model.language_model), ops=Ops(), steps=5)
    for length in (5, 37, 20):
        images = list(rng.integers(0, 256, (layout.images, 224, 224, 3), dtype=np.uint8))
        prompt = np.array([1, *rng.integers(3, 400, length), 317])
        state, noise = rng.uniform(-1, 1, layout.state), rng.normal(size=(layout.chunk, layout.action))
        asked.append(ChunkRequest(images, prompt, state, noise))
    theirs = [policy.loaded.engine.answer(one).normalized for one in asked]
    for some in (slice(3), slice(1), slice(2, 3)):
        ours = [chunk.normalized for chunk in engine.answer_all(asked[some])]
        np.testing.assert_allclose(ours, theirs[some], atol=BOUND[variant] / 10)
    assert torch.is_inference_mode_enabled() is False
