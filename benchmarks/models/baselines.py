"""Baselines over the same weights and images: eager ``generate`` and compiled decoding."""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vla_ros.errors import MissingDependencyError, install
from vla_ros.types import IntArray, UInt8Array
from vla_ros_models.engine import decoder
from vla_ros_models.engine.ops import Ops, visible
from vla_ros_models.engine.runner import make_runner
from vla_ros_models.engine.stream import KVCache
from vla_ros_models.engine.weights import DecoderWeights
from vla_ros_models.openvla.network import OpenVLAModel

Answer = Callable[[UInt8Array], IntArray]
"""Uint8 [H, W, 3] of the model's size to tokens int64 [D]."""


@torch.inference_mode()
def time_baseline(
    answer: Answer, image_at: Callable[[int], UInt8Array], steps: int, warmup: int
) -> tuple[list[float], list[IntArray]]:
    """Run a baseline after ``warmup`` unmeasured steps; return milliseconds and tokens for each image."""
    times, tokens = [], []
    for index in range(-warmup, steps):
        image = image_at(index % steps)
        began = time.perf_counter()
        answered = answer(image)
        if index >= 0:
            times.append(1e3 * (time.perf_counter() - began))
            tokens.append(answered)
    return times, tokens


def eager_generate(model: OpenVLAModel, prompt: IntArray, count: int) -> Answer:
    """Run transformers' eager ``generate``, as users of the published code do."""
    plain, ids = _transformers_llama(model), torch.from_numpy(prompt)[None].to(model.device)

    def answer(image: UInt8Array) -> IntArray:
        pixels = model.normalize(torch.from_numpy(image)[None].to(model.device))
        sequence = model.embed_sequence(model.embed_image(pixels), ids)
        mask = torch.ones(sequence.shape[:2], dtype=torch.int64, device=model.device)
        made = plain.generate(
            inputs_embeds=sequence, attention_mask=mask, max_new_tokens=count, min_new_tokens=count, do_sample=False
        )
        tokens: IntArray = made[0, -count:].cpu().numpy()
        return tokens

    return answer


class StaticOps(Ops):
    """torch's operations with shapes that do not depend on the position: the whole cache is read behind a mask."""

    def _visible(self, at: Tensor, capacity: int) -> tuple[int, Tensor | None]:
        return capacity, visible(at, capacity)


def compiled_static_cache(
    model: OpenVLAModel, weights: DecoderWeights, prompt: IntArray, count: int, backend: str = "inductor"
) -> Answer:
    """Build a static KV cache under ``torch.compile`` with CUDA graphs, as in gpt-fast.

    The strongest baseline in plain PyTorch: vision encoder with prefill, and one decoding step, each compiled as a
    whole; two graphs are replayed per answer. ``weights`` are those of ``model``, not quantised, fused or as
    loaded.
    """
    device, ops, runner = model.device, StaticOps(), make_runner(model.device)
    size, length = model.architecture.image_size, model.architecture.patches + len(prompt)
    ids = torch.from_numpy(prompt)[None].to(device)
    cache = KVCache.allocate(weights, 1, length + count)
    images = torch.zeros(1, size, size, 3, dtype=torch.uint8, device=device)
    tokens = torch.zeros(1, count, dtype=torch.int64, device=device)
    positions = torch.arange(length - 1, length + count, dtype=torch.int32, device=device)[:, None]

    def prefill(pixels: Tensor) -> Tensor:
        patches = model.embed_image(model.normalize(pixels))
        return ops.choose(decoder.prefill(weights, ops, cache, patches, ids, positions[0], 1))[0]

    def decode_one(token: Tensor, position: Tensor) -> Tensor:
        return ops.choose(decoder.verify(weights, ops, cache, token, position))[0]

    first, following = (torch.compile(step, dynamic=False, backend=backend) for step in (prefill, decode_one))

    def run_prefill() -> None:
        tokens[:, :1] = first(images)

    def run_decode() -> None:
        for step in range(1, count):
            tokens[:, step : step + 1] = following(tokens[:, step - 1 : step].clone(), positions[step])

    with torch.inference_mode(), runner.stream():
        stages = [runner.capture(stage) for stage in (run_prefill, run_decode)]

    def answer(image: UInt8Array) -> IntArray:
        with runner.stream():
            runner.upload(images, image[None])
            for stage in stages:
                stage()
            found: IntArray = runner.download(tokens)[0]
            return found

    return answer


def _transformers_llama(model: OpenVLAModel) -> Any:
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
    except ImportError as error:
        raise MissingDependencyError(f"the baseline needs transformers: {install('bench')}") from error
    llm = model.architecture.llm
    config = LlamaConfig(
        vocab_size=llm.vocab_size,
        hidden_size=llm.hidden_size,
        intermediate_size=llm.intermediate_size,
        num_hidden_layers=llm.layers,
        num_attention_heads=llm.heads,
        num_key_value_heads=llm.kv_heads,
        head_dim=llm.head_dim,
        rms_norm_eps=llm.rms_norm_eps,
        max_position_embeddings=llm.max_positions,
        rope_theta=llm.rope_theta,  # as versions before 5 name it
        rope_parameters={"rope_type": "default", "rope_theta": llm.rope_theta},
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        attn_implementation="sdpa",
        dtype=model.dtype,
    )
    with torch.device("meta"):
        plain = LlamaForCausalLM(config)
    plain.load_state_dict(dict(model.language_model.named_parameters()), assign=True, strict=True)
    plain.model.rotary_emb = LlamaRotaryEmbedding(config).to(model.device)  # its table is no weight
    return plain.eval()
