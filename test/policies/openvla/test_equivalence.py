import pytest
import torch

from vla_ros_models.engine import decoder
from vla_ros_models.engine.ops import Ops
from vla_ros_models.engine.shapes import DecoderShape
from vla_ros_models.engine.stream import KVCache
from vla_ros_models.engine.weights import LlamaDecoder, as_loaded


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_transformers_llama_gives_the_same_hidden_states(kv_heads):
    transformers = pytest.importorskip("transformers")
    shape = DecoderShape(64, 96, 2, 4, kv_heads, 16, 3e-3, 5000.0, vocab_size=50, max_positions=64)
    torch.manual_seed(0)
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=50,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=kv_heads,
            rms_norm_eps=3e-3,
            rope_theta=5000.0,
            max_position_embeddings=64,
            pad_token_id=None,
        )
    ).eval()
    ours, ops = LlamaDecoder(shape).eval(), Ops()
    ours.load_state_dict(theirs.state_dict())
    ids = torch.randint(0, 50, (3, 12))
    with torch.inference_mode():
        expected, weights = theirs(input_ids=ids).logits, as_loaded(ours)
        whole = ours.lm_head(decoder.hidden_states(weights, ops, ours.model.embed_tokens(ids)))
        cache, parts, start = KVCache.allocate(weights, 3, 12), [], torch.zeros(3, dtype=torch.int32)
        for part in ids.split([5, 1, 4, 2], dim=1):
            parts.append(decoder.verify(weights, ops, cache, part, start))
            start = start + part.shape[1]
    torch.testing.assert_close(whole, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(torch.cat(parts, dim=1), expected, rtol=1e-4, atol=1e-5)


def test_gradients_reach_every_weight(small):
    from vla_ros_models.openvla.network import OpenVLAModel

    model = OpenVLAModel(small)
    logits, _, _ = model(model.normalize(torch.zeros(1, 224, 224, 3, dtype=torch.uint8)), torch.tensor([[1, 5, 9]]))
    logits.square().mean().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
