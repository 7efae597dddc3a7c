"""Quantised weights on any device: only the decoder's layers, with similar logits."""

import numpy as np
import pytest
import torch

from tools.checkpoints.tiny import tiny_architecture, write_tiny
from vla_ros_models.engine import decoder
from vla_ros_models.engine.ops import Ops
from vla_ros_models.engine.stream import KVCache
from vla_ros_models.engine.weights import as_loaded


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Wide enough that quantisation has groups to work on."""
    path = tmp_path_factory.mktemp("wide")
    write_tiny(path, architecture=tiny_architecture(vocabulary=768, empty_token=500, llm_width=128))
    return path


def logits(loaded, weights, image):
    model = loaded.model
    ids = torch.from_numpy(loaded.prompt.encode("pick up the red cube"))[None]
    with torch.inference_mode():
        patches = model.embed_image(model.normalize(torch.from_numpy(image)[None]))
        length = patches.shape[1] + ids.shape[1]
        cache, last = KVCache.allocate(weights, 1, length), torch.tensor([length - 1], dtype=torch.int32)
        return decoder.prefill(weights, Ops(), cache, patches, ids, last, 1).flatten().numpy()


@pytest.mark.parametrize(("kind", "least"), [("int8", 0.99), ("int4", 0.9), ("fp8", 0.98)])
def test_only_the_decoders_layers_are_quantised(folder, make_policy, observe, kind, least):
    policy, exact = make_policy(folder, quantization=kind), make_policy(folder, dtype="bfloat16", self_test=False)
    policy.load()
    exact.load()
    weights = policy.loaded.engine.weights
    assert {matrix.kind for layer in weights.layers for matrix in layer.matrices} == {kind}
    assert weights.lm_head.kind == "dense"
    assert {parameter.dtype for parameter in policy.loaded.model.parameters()} == {torch.bfloat16}
    image = observe().images["image"]
    found = logits(policy.loaded, weights, image)
    expected = logits(exact.loaded, as_loaded(exact.loaded.model.language_model), image)
    assert np.corrcoef(found, expected)[0, 1] > least
    assert policy.infer(policy.start_session(), observe()).tokens.shape == (7,)
