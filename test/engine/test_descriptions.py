"""Descriptions of decoders, run in plain torch, against transformers' models and torch's own layers."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from vla_ros_models.engine.decoder import hidden_states, run_layers
from vla_ros_models.engine.ops import Ops
from vla_ros_models.engine.shapes import DecoderShape
from vla_ros_models.engine.stream import Cross, KVCache, Stream
from vla_ros_models.engine.weights import DecoderWeights, Layer, Matrix, linears_by_role, rotary_tables

DESCRIPTIONS = {
    "Llama": DecoderShape(64, 96, 2, 4, 4, 16, 3e-3, 5000.0, max_positions=64),
    "SmolLM2": DecoderShape(60, 160, 2, 3, 1, 20, 1e-5, 1e5, max_positions=64),
    "Qwen3": DecoderShape(64, 96, 3, 4, 2, 24, 1e-6, 5e6, max_positions=64),
    "Gemma": DecoderShape(48, 96, 2, 4, 1, 16, 1e-6, 1e4, norm="rms_float32", activation="gelu", max_positions=64),
}


def of_transformers(name: str, shape: DecoderShape):
    """Return transformers' model with random weights and no neutral norm, and these weights for our passes."""
    transformers = pytest.importorskip("transformers")
    family = {"SmolLM2": "Llama"}.get(name, name)
    config = getattr(transformers, f"{family}Config")(
        vocab_size=50,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        rms_norm_eps=shape.rms_norm_eps,
        rope_theta=shape.rope_theta,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        max_position_embeddings=64,
        pad_token_id=None,
    )
    model = getattr(transformers, f"{family}Model")(config).eval().requires_grad_(False)
    for parameter_name, parameter in model.named_parameters():
        if "norm" in parameter_name:
            parameter += 0.3 * torch.randn_like(parameter)
    norms = [norm for layer in model.layers for norm in (layer.input_layernorm, layer.post_attention_layernorm)]
    norms = [norm.weight for norm in (*norms, model.norm)]
    if shape.norm == "rms_float32":
        norms = [1 + weight[None, None] for weight in norms]
    layers = []
    for layer in model.layers:
        matrices = {role: Matrix.of_linears(role, *own) for role, own in linears_by_role(layer).items()}
        own = layer.self_attn
        qk_norms = (own.q_norm.weight, own.k_norm.weight) if name == "Qwen3" else None
        layers.append(Layer(*Layer.of(matrices).matrices, qk_norms=qk_norms))
    return model, DecoderWeights(shape, tuple(layers), tuple(norms), *rotary_tables(shape))


@pytest.mark.parametrize("name", DESCRIPTIONS)
@torch.inference_mode()
def test_a_description_equals_transformers_model(name):
    torch.manual_seed(0)
    shape, ops = DESCRIPTIONS[name], Ops()
    model, weights = of_transformers(name, shape)
    embedded = torch.randn(3, 12, shape.hidden_size)
    expected = model(inputs_embeds=embedded).last_hidden_state
    torch.testing.assert_close(hidden_states(weights, ops, embedded), expected, rtol=0, atol=1e-5)

    cache, start, parts = KVCache.allocate(weights, 3, 12), 0, []
    for part in embedded.split([5, 1, 4, 2], dim=1):
        at = torch.arange(start, start + part.shape[1], dtype=torch.int32).expand(3, -1)
        positions = ops.positions(weights, cache, at)
        parts.append(ops.norm(weights, run_layers(weights, ops, cache, Stream(part), positions)))
        start += part.shape[1]
    torch.testing.assert_close(torch.cat(parts, dim=1), expected, rtol=0, atol=1e-5)


class Block(nn.Module):
    """A block of a diffusion transformer, of torch's layers: adaptive layer norms, GELU, biases, no rotation."""

    def __init__(self, width: int, heads: int, context: int | None) -> None:
        super().__init__()
        self.modulation = nn.Linear(8, 6 * width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True, kdim=context, vdim=context)
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)
        nn.init.normal_(self.attention.in_proj_bias)
        nn.init.normal_(self.attention.out_proj.bias)

    def parts(self, condition: torch.Tensor) -> torch.Tensor:
        """Scale, shift and gate of both norms: [..., 2, 3, width]."""
        return self.modulation(condition).unflatten(-1, (2, 3, -1))

    def forward(self, hidden, condition, context, ignored):
        parts = self.parts(condition).movedim((-3, -2), (0, 1))
        for number, (scale, shift, gate) in enumerate(parts):
            normed = functional.layer_norm(hidden, hidden.shape[-1:], eps=1e-5) * (1 + scale) + shift
            if number:
                branch = self.down(functional.gelu(self.up(normed), approximate="tanh"))
            else:
                source = normed if context is None else context
                branch = self.attention(normed, source, source, ignored if context is not None else None)[0]
            hidden = hidden + gate * branch
        return hidden

    def layer(self) -> Layer:
        """The same block in the engine's form."""

        def matrix(role: str, weight: torch.Tensor, bias: torch.Tensor) -> Matrix:
            return Matrix(weight, "dense", weight.shape[1], role, bias=bias)

        own, cross = self.attention, None
        biases = own.in_proj_bias.chunk(3)
        if own.in_proj_weight is None:
            qkv = matrix("qkv", own.q_proj_weight, biases[0])
            cross = matrix("k", own.k_proj_weight, biases[1]), matrix("v", own.v_proj_weight, biases[2])
        else:
            qkv = matrix("qkv", own.in_proj_weight, own.in_proj_bias)
        outputs = (("o_proj", own.out_proj), ("gate_up", self.up), ("down_proj", self.down))
        return Layer(qkv, *(matrix(role, one.weight, one.bias) for role, one in outputs), cross=cross)


@torch.inference_mode()
def test_a_diffusion_transformer_is_a_description():
    """Layers cross to another model's states in turn; rows have times of their own."""
    torch.manual_seed(1)
    width, heads, rows, source = 48, 4, 7, 11
    blocks = nn.ModuleList(Block(width, heads, None if index % 2 else 32) for index in range(4)).eval()
    hidden, context, conditions = torch.randn(2, rows, width), torch.randn(2, source, 32), torch.randn(3, 8)
    time = torch.randint(0, 3, (2, rows), dtype=torch.int32)
    ends = torch.tensor([source, 6])
    ignored = torch.arange(source) >= ends[:, None]
    expected = hidden
    for index, block in enumerate(blocks):
        expected = block(expected, conditions[time], None if index % 2 else context, ignored)

    shape = DecoderShape(
        width, 3 * width, 4, heads, heads, width // heads, 1e-5, norm="layer", activation="gelu", gated=False,
        rotary=False,
    )  # fmt: skip
    tables = [part for block in blocks for part in block.parts(conditions).unbind(1)]
    norms = tuple(table + torch.tensor([1.0, 0.0, 0.0])[:, None] for table in tables)
    weights = DecoderWeights(
        shape, tuple(block.layer() for block in blocks), norms, *torch.zeros(2, 16, shape.head_dim // 2)
    )
    ops, cache = Ops(), KVCache.allocate(weights, 2, rows)
    crossed = KVCache.allocate(weights, 2, source)
    for index in (0, 2):
        ops.write_cross(weights, crossed, index, context[:, None], context[:, None])
    at = torch.arange(rows, dtype=torch.int32).expand(2, -1)
    seen = ends.int()[:, None].expand(2, rows)
    cross = Cross(crossed, ops.prefix_positions(weights, crossed, at, seen))
    positions = ops.prefix_positions(weights, cache, at, torch.full_like(at, rows), time)
    stream = run_layers(weights, ops, cache, ops.start(weights, hidden, positions), positions, cross=cross)
    torch.testing.assert_close(stream.hidden, expected, rtol=0, atol=1e-5)
    wrong = run_layers(weights, ops, cache, ops.start(weights, hidden, positions), positions, cross=Cross(
        crossed, ops.prefix_positions(weights, crossed, at, torch.full_like(at, source))
    ))  # fmt: skip
    assert (wrong.hidden[1] - expected[1]).abs().max() > 1e-2
