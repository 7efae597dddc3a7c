"""A new model family on the shared decoder, in one file: a description, weight names, a network and the policy.

The family is made up: patches of one image through a linear layer, the bytes of the instruction, and a SmolLM2
(grouped key heads) whose last hidden state a linear layer maps to an action. The checkpoint has transformers' names
and sizes.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="the library torch is not installed (extra 'openvla')")

import torch
from torch import Tensor, nn

from vla_ros.config import Config
from vla_ros.contract.spec import ImageFeature, PolicySpec
from vla_ros.errors import CheckpointError
from vla_ros.policies.base import Progress, Session
from vla_ros.policies.options import NetworkOptions
from vla_ros.types import ActionChunk, Observation, UInt8Array
from vla_ros.vision.processors import ResizeNaive
from vla_ros_models.checkpoint_files import from_files, read_fields, read_manifest
from vla_ros_models.engine.decoder import embed_sequence, parallel
from vla_ros_models.engine.device_ops import make_ops
from vla_ros_models.engine.kernel_check import checked
from vla_ros_models.engine.shapes import DecoderShape
from vla_ros_models.engine.stream import KVCache
from vla_ros_models.engine.weights import DecoderWeights, LlamaDecoder, fuse
from vla_ros_models.memory import MemoryCheck, cache_numbers, memory_needs, prefill_numbers
from vla_ros_models.network_policy import Asked, Images, NetworkPolicy, Placement
from vla_ros_models.weights import check_weights, empty, fill, parameter_shapes

PATCH, SIDE = 14, 56
TOKENS = (SIDE // PATCH) ** 2 + 64


class ToyNetwork(LlamaDecoder):
    """The family's parameters; those of the decoder are named as in transformers."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__(shape)
        self.vision = nn.Linear(3 * PATCH**2, shape.hidden_size)
        self.action = nn.Linear(shape.hidden_size, 7)


@dataclass(frozen=True)
class Loaded:
    """The network, the decoder's weights in the engine's form, and the operations that run them."""

    network: ToyNetwork
    weights: DecoderWeights
    ops: Any
    engine = None

    @torch.inference_mode()
    def answer(self, image: UInt8Array, text: list[int]) -> Tensor:
        pixels = torch.from_numpy(image).float() / 255
        patches = pixels.unfold(0, PATCH, PATCH).unfold(1, PATCH, PATCH).flatten(0, 1).flatten(1)
        sequence = embed_sequence(self.weights, self.network.vision(patches)[None], torch.tensor([text]))
        cache = KVCache.allocate(self.weights, 1, sequence.shape[1], layers=1)
        last = torch.tensor([[sequence.shape[1] - 1]])
        return self.network.action(parallel(self.weights, self.ops, cache, sequence, last, None))[0]


class ToyPolicy(NetworkPolicy[Loaded, Session, tuple[UInt8Array, list[int]]]):
    """The family as a policy."""

    title = "Toy"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.spec = PolicySpec((ImageFeature("image", ResizeNaive((SIDE, SIDE))),))

    def start_session(self) -> Session:
        return Session()

    def _open(self, where: Placement) -> ToyNetwork:
        text = read_fields(self.folder / "config.json")
        heads = text.whole("num_attention_heads", None)
        shape = DecoderShape(
            text.whole("hidden_size", None),
            text.whole("intermediate_size", None),
            text.whole("num_hidden_layers", None),
            heads,
            text.whole("num_key_value_heads", heads),
            text.whole("head_dim", None),
            text.number("rms_norm_eps", 1e-5),
            vocab_size=text.whole("vocab_size", None),
            max_positions=128,
        )
        network = empty(lambda: ToyNetwork(shape))
        check_weights(parameter_shapes(network), read_manifest(self.folder), lambda name: False, str(self.folder))

        def plan(dtype: str, quantization: str, device: str) -> Any:
            total = 4 * sum(prod(size) for size in parameter_shapes(network).values())
            return memory_needs(total, 4 * cache_numbers(shape, TOKENS), 4 * prefill_numbers(shape, TOKENS), device)

        self._memory = MemoryCheck(plan, (("float32", "none"),), str(where.device))
        return network

    def _build(self, opened: ToyNetwork, where: Placement, progress: Progress) -> None:
        fill(opened, from_files(read_manifest(self.folder)), where.device, torch.float32, progress)
        weights = fuse(opened)
        self._loaded = Loaded(opened, weights, checked(make_ops(where.device), weights))

    def _warm_up(self, batch: int) -> bool:
        return False

    def _request(self, session: Session, observation: Observation, images: Images) -> tuple[UInt8Array, list[int]]:
        image = images["image"]
        assert isinstance(image, np.ndarray)
        return image, [1, *observation.instruction.encode()[:63]]

    def _answer(self, asked: Sequence[Asked[Session, tuple[UInt8Array, list[int]]]]) -> Iterator[ActionChunk]:
        for one in asked:
            actions = self.loaded.answer(*one.request).double().numpy()
            yield ActionChunk(actions, stamp=one.observation.stamp, normalized=actions)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Random weights of transformers' SmolLM2 architecture, with the two layers of the family."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=3,
        num_key_value_heads=1, head_dim=16, rms_norm_eps=1e-5, max_position_embeddings=128,
        tie_word_embeddings=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    model.vision, model.action = nn.Linear(3 * PATCH**2, 48), nn.Linear(48, 7)
    model.save_pretrained(tmp_path)
    return tmp_path


def make(folder: Path) -> ToyPolicy:
    return ToyPolicy(Config(policy=NetworkOptions(checkpoint=str(folder), device="cpu")))


def test_a_family_of_one_file_loads_checks_and_infers(checkpoint: Path) -> None:
    transformers = pytest.importorskip("transformers")
    policy, lines = make(checkpoint), []
    policy.load(lambda share, what: lines.append(what))
    assert lines[-1].startswith(f"Toy {checkpoint.name} on cpu in float32")
    image = np.random.default_rng(1).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
    chunk = policy.infer(policy.start_session(), Observation({"image": image}, "close the drawer", stamp=3))
    assert (chunk.stamp, chunk.actions.shape) == (3, (1, 7))

    # The same from transformers, with its causal mask lifted.
    network, model = policy.loaded.network, transformers.LlamaForCausalLM.from_pretrained(checkpoint).model
    pixels = torch.from_numpy(image).float() / 255
    patches = pixels.unfold(0, PATCH, PATCH).unfold(1, PATCH, PATCH).reshape(16, -1)
    words = model.embed_tokens(torch.tensor([1, *b"close the drawer"]))
    sequence = torch.cat([words[:1], network.vision(patches), words[1:]])[None]
    mask = torch.zeros(1, 1, sequence.shape[1], sequence.shape[1])
    with torch.inference_mode():
        state = model(inputs_embeds=sequence, attention_mask=mask).last_hidden_state[:, -1]
        np.testing.assert_allclose(chunk.actions, network.action(state).numpy(), rtol=0, atol=1e-5)


def test_a_family_of_one_file_refuses_damaged_weights(checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {"intermediate_size": 80}))
    with pytest.raises(CheckpointError, match=r"of the wrong shape: model.layers.0.mlp.down_proj.weight"):
        make(checkpoint).load()
