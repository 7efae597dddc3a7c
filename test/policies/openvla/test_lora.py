"""What an adapter says is obeyed as by peft (``data/lora.json``), or refused by name.

Where peft is installed, its own merged weights are compared, too; ``RECORD_PEFT=1`` writes them.
"""

import importlib.util
import json
import os
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from vla_ros.errors import CheckpointError
from vla_ros_models.checkpoint_files import read_manifest
from vla_ros_models.oft.loading import merged_towers
from vla_ros_models.openvla.loading import LoraSettings, merging, read_adapter, read_lora_settings

FILE = Path(__file__).parents[2] / "data" / "lora.json"
RECORDED = json.loads(FILE.read_text())
HAS_PEFT = importlib.util.find_spec("peft") is not None
RECORD = "RECORD_PEFT" in os.environ

LAYERS = [f"model.layers.{index}.self_attn.{name}_proj" for index in (0, 1) for name in "qv"]
SHAPES = {**dict.fromkeys(LAYERS, (6, 6)), "embed_tokens": (8, 6), "patch": (4, 3, 2, 2)}
RANK = 2
CONFIG = {
    **{"peft_type": "LORA", "r": RANK, "lora_alpha": 3, "target_modules": ["q_proj", "v_proj", "patch"]},
    **{"bias": "none", "init_lora_weights": True, "lora_dropout": 0.1, "base_model_name_or_path": "some/base"},
}


def numbers(name, *shape):
    random = np.random.default_rng(list(name.encode()))
    return torch.from_numpy(random.standard_normal(shape).astype(np.float32))


BASE = {f"{name}.weight": numbers(name, *shape) for name, shape in SHAPES.items()}


def pair(layer):
    rows, columns, *rest = SHAPES[layer]
    ends = (1, 1) if rest else ()
    stem = f"base_model.model.{layer}"
    a = numbers(f"{layer} A", RANK, columns, *rest)
    return {f"{stem}.lora_A.weight": a, f"{stem}.lora_B.weight": numbers(f"{layer} B", rows, RANK, *ends)}


PAIRS = {key: value for layer in (*LAYERS, "patch") for key, value in pair(layer).items()}
Q0 = "base_model.model.model.layers.0.self_attn.q_proj"
WORD = "base_model.model.embed_tokens"
EMBEDDING = {
    f"{WORD}.lora_embedding_A": numbers("embedding A", RANK, 8),
    f"{WORD}.lora_embedding_B": numbers("embedding B", 6, RANK),
}

LINEAR = {"target_modules": ["q_proj", "v_proj"]}

CASES = {  # changes of the configuration, more tensors, and what the refusal names
    "": ({}, {}, ""),
    "alpha": ({"lora_alpha": 7}, {}, ""),
    "rslora": ({"use_rslora": True}, {}, ""),
    "a pattern": ({"target_modules": r".*\.[qv]_proj|patch"}, {}, ""),
    "gaussian": ({"init_lora_weights": "gaussian"}, {}, ""),
    "without init": ({"init_lora_weights": False}, {}, ""),
    "orthogonal": ({"init_lora_weights": "orthogonal", **LINEAR}, {}, ""),
    "eva": ({"init_lora_weights": "eva", "eva_config": {"rho": 2.0}, **LINEAR}, {}, ""),
    "training": ({"lora_dropout": 0.5, "inference_mode": True, "task_type": None, "revision": "main"}, {}, ""),
    "unknown, off": ({"use_newest": False, "newest_config": None}, {}, ""),
    "unknown": ({"use_newest": 2}, {}, "use_newest"),
    "rank": ({"r": 4}, {}, "r: found 4"),
    "pissa": ({"init_lora_weights": "pissa", **LINEAR}, {}, "init_lora_weights: found 'pissa'"),
    "pissa_niter": ({"init_lora_weights": "pissa_niter_4", **LINEAR}, {}, "init_lora_weights"),
    "olora": ({"init_lora_weights": "olora", **LINEAR}, {}, "init_lora_weights"),
    "corda": ({"init_lora_weights": "corda", "corda_config": {}}, {}, "init_lora_weights"),
    "alpha_pattern": ({"alpha_pattern": {"q_proj": 5}}, {}, "alpha_pattern"),
    "rank_pattern": ({"rank_pattern": {"q_proj": 2}}, {}, "rank_pattern"),
    "fan_in_fan_out": ({"fan_in_fan_out": True}, {}, "fan_in_fan_out"),
    "dora": ({"use_dora": True}, {f"{Q0}.lora_magnitude_vector": numbers("magnitude", 6).abs()}, "use_dora"),
    "bias": ({"bias": "lora_only"}, {}, "bias: found 'lora_only'"),
    "lora_bias": ({"lora_bias": True}, {f"{Q0}.lora_B.bias": numbers("bias", 6)}, "lora_bias"),
    "a bias": ({}, {f"{Q0}.lora_B.bias": numbers("bias", 6)}, "lora_B.bias"),
    "embedding": ({"target_modules": ["q_proj", "v_proj", "patch", "embed_tokens"]}, EMBEDDING, "lora_embedding_A"),
    "tokens": (
        {"trainable_token_indices": {"embed_tokens": [1, 3]}},
        {f"{WORD}.token_adapter.trainable_tokens_delta": numbers("tokens", 2, 6)},
        "trainable_token_indices",
    ),
    "modules_to_save": (
        {"modules_to_save": ["embed_tokens"]},
        {f"{WORD}.weight": numbers("saved", 8, 6)},
        "modules_to_save",
    ),
    "fewer targets": ({"target_modules": ["q_proj", "patch"]}, {}, "target_modules"),
    "exclude_modules": ({"exclude_modules": ["v_proj"]}, {}, "exclude_modules"),
    "layers_to_transform": ({"layers_to_transform": [0]}, {}, "layers_to_transform"),
    "another number": ({"layers_to_transform": 1, **LINEAR}, {}, "layers_to_transform"),
    "another stem": (
        {"layers_to_transform": [0, 1], "layers_pattern": "blocks", **LINEAR},
        {},
        "layers_to_transform",
    ),
    "no numbers": ({"layers_to_transform": ["0"], **LINEAR}, {}, "layers_to_transform: found"),
    "no names": ({"exclude_modules": {"v_proj": 1}}, {}, "exclude_modules: found"),
    "no pattern": ({"exclude_modules": "(v_proj"}, {}, "exclude_modules: found"),
    "without others": ({"exclude_modules": ["embed_tokens", "k_proj"]}, {}, ""),
    "without a pattern": ({"exclude_modules": r"vision.*|embed_tokens"}, {}, ""),
    "all numbers": ({"layers_to_transform": [0, 1], **LINEAR}, {}, ""),
    "numbers of a stem": ({"layers_to_transform": [0, 1, 7], "layers_pattern": ["layers"], **LINEAR}, {}, ""),
    "layer_replication": ({"layer_replication": [[0, 2], [1, 2]]}, {}, "layer_replication"),
    "another kind": ({"peft_type": "LOHA"}, {}, "peft_type"),
}


@pytest.fixture
def folder(tmp_path):
    """The base model, and a function that writes an adapter."""
    save_file(BASE, tmp_path / "model.safetensors")

    def write(changes, more):
        config = {**CONFIG, **changes}
        # peft's other ways of initialisation do not know convolutions
        skipped = "" if "patch" in config["target_modules"] else ".patch."
        pairs = {key: value for key, value in PAIRS.items() if not skipped or skipped not in key}
        (tmp_path / "adapter_config.json").write_text(json.dumps(config))
        save_file({**pairs, **more}, tmp_path / "adapter_model.safetensors")
        return tmp_path

    return write


def flat(weights):
    return np.concatenate([weights[name].detach().float().numpy().ravel() for name in BASE])


@pytest.mark.parametrize("name", CASES)
def test_an_adapter_is_obeyed_or_refused(folder, name):
    changes, more, refused = CASES[name]
    where = folder(changes, more)
    if refused:
        with pytest.raises(CheckpointError, match=refused):
            read_adapter(where, read_manifest(where))
        return
    stored = read_manifest(where)
    merged = dict(merging(stored, read_adapter(where, stored))(list(BASE)))
    np.testing.assert_allclose(flat(merged), RECORDED[name], atol=1e-5, rtol=0)


def test_what_is_refused_would_change_weights():
    """The refused adapters differ from plain LoRA in peft itself."""
    moved = {
        name
        for name, found in RECORDED.items()
        if isinstance(found, list) and np.abs(np.array(found) - RECORDED[""]).max() > 0.1
    }
    assert {"alpha", "embedding", "tokens", "dora", "alpha_pattern", "fewer targets"} < moved
    plain = np.array(RECORDED["orthogonal"])
    assert all(np.abs(np.array(RECORDED[name]) - plain).max() > 0.1 for name in ("pissa", "pissa_niter", "olora"))


@pytest.mark.parametrize("version", ["0.11.1", "0.14.0", "0.18.1", "0.21.2"])
def test_default_configurations_of_peft_are_read(tmp_path, version):
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(RECORDED["defaults"][version]))
    assert read_lora_settings(path).scale(8) == 1.0


@pytest.mark.parametrize(
    ("changes", "more", "words"),
    [
        ({"use_dora": True}, {}, "use_dora"),
        ({"init_lora_weights": "olora", **LINEAR}, {}, "init_lora_weights"),
        ({"r": 5}, {}, "r: found 5"),
        ({}, {"qkv.lora_magnitude_vector.default.weight": torch.ones(6)}, "lora_magnitude_vector"),
        ({}, {"qkv.lora_B.default.bias": torch.ones(6)}, r"lora_B\.default\.bias"),
    ],
)
def test_adapters_of_film_towers_are_refused_likewise(tmp_path, changes, more, words):
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps({**CONFIG, **changes}))
    tensors = {
        "qkv.base_layer.weight": torch.zeros(6, 6),
        "qkv.lora_A.default.weight": torch.ones(RANK, 6),
        "qkv.lora_B.default.weight": torch.ones(6, RANK),
    }
    assert float(merged_towers(tensors, path, LoraSettings())["qkv.weight"][0, 0]) == RANK
    with pytest.raises(CheckpointError, match=words):
        merged_towers({**tensors, **more}, path, read_lora_settings(path))


class Node(torch.nn.Module):
    """Modules under dotted names."""

    def add(self, name, module):
        first, _, rest = name.partition(".")
        if not rest:
            self.add_module(first, module)
            return
        if first not in self._modules:
            self.add_module(first, Node())
        self._modules[first].add(rest, module)


@pytest.mark.skipif(not HAS_PEFT, reason="needs peft")
@pytest.mark.parametrize("name", CASES)
def test_peft_answers_as_recorded(folder, name):
    import peft

    model = Node()
    for layer in LAYERS:
        model.add(layer, torch.nn.Linear(6, 6, bias=False))
    model.add("embed_tokens", torch.nn.Embedding(8, 6))
    model.add("patch", torch.nn.Conv2d(3, 4, 2, bias=False))
    model.load_state_dict(BASE)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = flat(
                peft.PeftModel.from_pretrained(model, folder(*CASES[name][:2])).merge_and_unload().state_dict()
            )
    except Exception as error:  # whatever peft raises
        found = f"{type(error).__name__}: {error}".splitlines()[0][:160]
    if RECORD:
        RECORDED[name] = found if isinstance(found, str) else np.round(found.astype(float), 5).tolist()
        FILE.write_text(json.dumps(RECORDED, sort_keys=True).replace('], "', '],\n"').replace("}, ", "},\n") + "\n")
    elif isinstance(RECORDED[name], str):
        assert isinstance(found, str)
    elif name == "pissa_niter":  # peft's decomposition is random
        assert np.abs(found - RECORDED["orthogonal"]).max() > 0.1
    else:
        np.testing.assert_allclose(found, RECORDED[name], atol=1e-4, rtol=0)
