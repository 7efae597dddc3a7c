"""Quantisation with bitsandbytes: only the decoder's linear layers, with similar logits."""

import builtins

import numpy as np
import pytest
import torch

from tools.checkpoints.tiny import tiny_architecture, write_tiny
from vla_ros.errors import MissingDependencyError
from vla_ros.policies.openvla.loading import build_empty, is_quantizable
from vla_ros.policies.weights import is_quantized

PER_LAYER = 7


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Wide enough that quantisation has blocks to work on."""
    path = tmp_path_factory.mktemp("wide")
    write_tiny(path, architecture=tiny_architecture(vocabulary=768, empty_token=500, llm_width=128))
    return path


@pytest.mark.parametrize("mode", ["int8", "nf4"])
def test_only_the_decoders_linear_layers_are_quantised(folder, make_policy, observe, mode):
    pytest.importorskip("bitsandbytes")
    policy = make_policy(folder, quantization=mode)
    policy.load()
    model = policy.loaded.model
    quantized = [name for name, module in model.named_modules() if is_quantized(module)]
    assert len(quantized) == 2 * PER_LAYER
    assert all(is_quantizable(name + ".weight") for name in quantized)
    stored = {name: parameter.dtype for name, parameter in model.named_parameters()}
    assert {stored.pop(name + ".weight") for name in quantized} == {torch.int8 if mode == "int8" else torch.uint8}
    assert set(stored.values()) == {torch.bfloat16}

    exact = make_policy(folder)
    exact.load()
    image = torch.from_numpy(observe().images["image"])[None]
    logits = []
    for other in (exact, policy):
        network = other.loaded.model
        ids = torch.from_numpy(other.loaded.prompt.encode("pick up the red cube"))[None]
        with torch.inference_mode():
            logits.append(network.prefill(network.embed_image(network.normalize(image)), ids)[0][0].numpy())
    assert np.corrcoef(*logits)[0, 1] > (0.99 if mode == "int8" else 0.9)
    assert policy.infer(policy.start_session(), observe()).tokens.shape == (7,)


def test_missing_bitsandbytes_is_reported(monkeypatch, small):
    real = builtins.__import__

    def no_bitsandbytes(name, *args, **kwargs):
        if name == "bitsandbytes":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_bitsandbytes)
    with pytest.raises(MissingDependencyError, match=r"vla_ros\[quant\]"):
        build_empty(small, quantize="nf4")
