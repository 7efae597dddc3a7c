"""The baselines answer what plain decoding over the same weights answers."""

from importlib.util import find_spec

import numpy as np
import pytest

pytest.importorskip("torch", reason="the library torch is not installed (extra 'openvla')")
if find_spec("transformers") is None:  # not imported: that would take each worker two seconds
    pytest.skip("the library transformers is not installed (extra 'bench')", allow_module_level=True)

import torch

from benchmarks.models.baselines import compiled_static_cache, eager_generate, time_baseline
from benchmarks.models.subject import make_prompt, open_subject
from vla_ros_models.engine.weights import as_loaded, fuse


@pytest.fixture(scope="module")
def model():
    torch.set_num_threads(1)
    return open_subject("tiny", torch.device("cpu"), torch.float32).model


@torch.inference_mode()
def reference(model, image, prompt):
    patches = model.embed_image(model.normalize(torch.from_numpy(image)[None]))
    logits, prefix = model.prefill(patches, torch.from_numpy(prompt)[None], room=7)
    return model.greedy(logits, prefix, 7).tokens[0].numpy()


def test_every_baseline_gives_the_tokens_of_the_reference_path(model):
    """``torch.compile`` traces the steps as one graph each; its backend runs them without a compiler here."""
    rng, prompt = np.random.default_rng(0), make_prompt(model.architecture, 9)
    images = [rng.integers(0, 256, (224, 224, 3), dtype=np.uint8) for _ in range(2)]
    expected = [reference(model, image, prompt).tolist() for image in images]
    loaded = compiled_static_cache(model, as_loaded(model.language_model), prompt, 7, backend="eager")
    fused = compiled_static_cache(model, fuse(model.language_model), prompt, 7, backend="eager")
    for answer in (eager_generate(model, prompt, 7), loaded, fused):
        times, tokens = time_baseline(answer, images.__getitem__, 2, warmup=1)
        assert [one.tolist() for one in tokens] == expected
        assert len(times) == 2
