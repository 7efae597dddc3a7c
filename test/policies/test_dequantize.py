"""Weights that bitsandbytes stored are dequantised to the bit (``data/bitsandbytes.safetensors``).

Where bitsandbytes is installed, it quantises again; ``RECORD_BITSANDBYTES=1`` writes its tensors and answers.
"""

import importlib.util
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="the library torch is not installed (extra 'openvla')")

import torch
from safetensors.torch import load_file, save_file

from test.policies.oft.conftest import DATA, answer, cases, loaded
from vla_ros.errors import CheckpointError
from vla_ros_models.adapters import read_merged
from vla_ros_models.checkpoint_files import from_files
from vla_ros_models.convert import convert
from vla_ros_models.dequantize import read_dequantized

FILE = Path(__file__).parents[1] / "data" / "bitsandbytes.safetensors"
ADAPTER = FILE.parent / "adapters" / "oft"
GOLDEN = Path(__file__).parents[3] / "shared" / "golden" / "finetune" / "nf4.npz"
RECORD = "RECORD_BITSANDBYTES" in os.environ
NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
needs_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="needs bitsandbytes"
)

CASES = [  # type, double quantisation, data type, numbers per block, shape, storage
    ("nf4", False, "float32", 64, (37, 53), "uint8"),
    ("nf4", True, "float32", 64, (37, 53), "uint8"),
    ("nf4", False, "bfloat16", 64, (24, 80), "bfloat16"),
    ("nf4", True, "bfloat16", 64, (150, 128), "uint8"),
    ("nf4", False, "float16", 128, (10, 300), "float32"),
    ("nf4", True, "float16", 256, (24, 40), "uint8"),
    ("nf4", False, "float32", 4096, (10, 30), "float16"),
    ("fp4", False, "float32", 64, (37, 53), "uint8"),
    ("fp4", True, "bfloat16", 128, (24, 80), "bfloat16"),
    ("fp4", False, "float16", 64, (9, 64), "uint8"),
]


@torch.compiler.set_stance("force_eager")  # bitsandbytes compiles its formula for each case, which takes 25 s
def four_bit(weight, kind, double, block, storage="uint8"):
    """What a Linear4bit stores for a weight, and what bitsandbytes makes of it."""
    from bitsandbytes.backends.default.ops import _dequantize_4bit_compute
    from bitsandbytes.functional import dequantize_blockwise
    from bitsandbytes.nn import Params4bit

    quantized = Params4bit(
        weight, requires_grad=False, quant_type=kind, compress_statistics=double, blocksize=block,
        quant_storage=getattr(torch, storage),
    ).to("cpu")  # fmt: skip
    state = quantized.quant_state
    scales = dequantize_blockwise(state.absmax, state.state2) + state.offset if state.nested else state.absmax
    stored = {"weight": quantized.data, **{f"weight.{key}": one for key, one in state.as_dict(packed=True).items()}}
    packed = quantized.data.view(torch.uint8).reshape(-1)
    # Its kernel for AVX-512 errs where a row is no multiple of a block (0.50.2); this is what it does elsewhere.
    return stored, _dequantize_4bit_compute(packed, scales, state.code, block, state.shape, state.dtype)


def eight_bit(weight):
    from bitsandbytes.functional import int8_vectorwise_dequant, int8_vectorwise_quant

    numbers, scales, _ = int8_vectorwise_quant(weight.half())
    stored = {"weight": numbers, "SCB": scales, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return stored, int8_vectorwise_dequant(numbers, scales)


def quantized_again():
    """Tensors of all cases as bitsandbytes stores them, and its answers, by layer."""
    found = {}
    for number, (kind, double, dtype, block, shape, storage) in enumerate(CASES):
        weight = torch.randn(shape, generator=torch.Generator().manual_seed(number)) * 0.1
        weight.view(-1)[64 * (number % 4) : 64 * (number % 4 + 1)] = 0.0  # a block of zeros
        found[f"{number}"] = four_bit(weight.to(getattr(torch, dtype)), kind, double, block, storage)
    weight = torch.randn(37, 53, generator=torch.Generator().manual_seed(99))
    weight[3] = 0.0
    found["int8"] = eight_bit(weight)
    return found


def read(folder, stored):
    save_file({key: one.contiguous() for key, one in stored.items()}, folder / "model.safetensors")
    manifest = read_dequantized(folder)
    return manifest, dict(from_files(manifest)(list(manifest)))


@needs_bitsandbytes
def test_bitsandbytes_answers_as_recorded():
    found = quantized_again()
    flat = {f"{layer}.{key}": one for layer, (stored, _) in found.items() for key, one in stored.items()}
    flat |= {f"expected.{layer}.weight": one for layer, (_, one) in found.items()}
    if RECORD:
        save_file({key: one.contiguous() for key, one in flat.items()}, FILE)
    recorded = load_file(FILE)
    assert recorded.keys() == flat.keys()
    for key, one in flat.items():
        assert torch.equal(one.flatten().view(torch.uint8), recorded[key].flatten().view(torch.uint8)), key


def test_weights_are_dequantised_to_the_bit(tmp_path):
    tensors = load_file(FILE)
    expected = {key.removeprefix("expected."): one for key, one in tensors.items() if key.startswith("expected.")}
    stored = {key: one for key, one in tensors.items() if not key.startswith("expected.")}
    manifest, found = read(tmp_path, stored | {"norm.weight": torch.ones(3)})
    assert found.keys() == expected.keys() | {"norm.weight"}
    for key, one in expected.items():
        assert torch.equal(found[key], one), key
        assert found[key].dtype == one.dtype
        assert manifest[key].shape == tuple(one.shape)
        assert (
            manifest[key].dtype
            == {"torch.float32": "F32", "torch.bfloat16": "BF16", "torch.float16": "F16"}[str(one.dtype)]
        )


@pytest.mark.skipif(not GOLDEN.exists(), reason="needs the shared numbers of published code")
@pytest.mark.parametrize("double", ["", "_double"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("name", "shape"), [("a", (48, 80)), ("b", (37, 53)), ("c", (256, 300))])
def test_nf4_equals_the_shared_numbers(name, shape, dtype, double, tmp_path):
    with np.load(GOLDEN) as file:
        golden = {key: torch.from_numpy(np.array(file[key])) for key in file if file[key].dtype.kind != "U"}
    stem = f"{name}_{dtype}{double}"
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": dtype, "shape": shape}
    parts = {"absmax": golden[f"{stem}_absmax"], "quant_map": golden["code"]}
    if double:
        state |= {"nested_blocksize": 256, "nested_offset": float(golden[f"{stem}_offset"])}
        parts |= {"nested_absmax": golden[f"{stem}_nested_absmax"], "nested_quant_map": golden["nested_code"]}
    parts["quant_state.bitsandbytes__nf4"] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    stored = {f"x.weight.{key}": one for key, one in parts.items()}
    _, found = read(tmp_path, stored | {"x.weight": golden[f"{stem}_packed"]})
    weight, expected = found["x.weight"].float(), golden[f"{stem}_dequantized"]
    if name == "c":
        assert float(weight.double().sum()) == pytest.approx(float(golden[f"{stem}_dequantized_sum"]), rel=1e-6)
        weight = weight.flatten()[::37]
    assert torch.equal(weight, expected)


@pytest.mark.skipif(not GOLDEN.exists(), reason="needs the shared numbers of published code")
def test_a_qlora_adapter_is_merged_into_the_dequantised_base(tmp_path):
    with np.load(GOLDEN) as file:
        golden = {key: torch.from_numpy(np.array(file[key])) for key in file if file[key].dtype.kind != "U"}
    stem, base, adapter = "a_float32_double", tmp_path / "base", tmp_path / "adapter"
    base.mkdir()
    adapter.mkdir()
    state = {"blocksize": 64, "dtype": "float32", "shape": (48, 80), "nested_blocksize": 256}
    state |= {"quant_type": "nf4", "nested_offset": float(golden[f"{stem}_offset"])}
    parts = {
        "absmax": golden[f"{stem}_absmax"], "quant_map": golden["code"],
        "nested_absmax": golden[f"{stem}_nested_absmax"], "nested_quant_map": golden["nested_code"],
        "quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }  # fmt: skip
    read(base, {"x.weight": golden[f"{stem}_packed"]} | {f"x.weight.{key}": one for key, one in parts.items()})
    pair = {
        "base_model.model.x.lora_A.weight": golden["qlora_A"],
        "base_model.model.x.lora_B.weight": golden["qlora_B"],
    }
    save_file(pair, adapter / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 4 * float(golden["qlora_scale"]), "target_modules": ["x"]}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    manifest = read_merged(adapter, base)
    merged = dict(from_files(manifest)(["x.weight"]))["x.weight"]
    torch.testing.assert_close(merged, golden["qlora_merged_float32"], rtol=0, atol=1e-6)
    assert (merged.bfloat16().float() - golden["qlora_merged_bf16"]).abs().max() < 1e-6


def _quantize(folder, make, skipped=("lm_head", "projector")):
    """Quantise the matrices of a checkpoint as transformers does; return the weights as they are dequantised."""
    config = json.loads((folder / "config.json").read_text())
    exact = {}
    for file in folder.glob("*.safetensors"):
        stored = {}
        for key, one in load_file(file).items():
            layer, is_weight, _ = key.rpartition(".weight")
            named = is_weight and one.dim() == 2 and ("_proj" in key or ".blocks." in key)
            if not named or any(name in key for name in skipped):
                stored[key] = exact[key] = one
                continue
            parts, exact[key] = make(one)
            stored |= {f"{layer}.{name}": part.contiguous() for name, part in parts.items()}
        save_file(stored, file, metadata={"format": "pt"})
    said = {"quant_method": "bitsandbytes", "llm_int8_skip_modules": list(skipped), "bnb_4bit_quant_type": "nf4"}
    config["quantization_config"] = said | {"load_in_4bit": True, "bnb_4bit_quant_storage": "uint8"}
    (folder / "config.json").write_text(json.dumps(config))
    return exact


@needs_bitsandbytes
@pytest.mark.parametrize("kind", ["nf4", "double", "int8"])
def test_a_quantised_checkpoint_runs_as_its_dequantised_weights(kind, tmp_path):
    """The same chunk as with the weights that bitsandbytes dequantises, not that of the original weights."""
    folder, plain = tmp_path / "quantised", tmp_path / "plain"
    for one in (folder, plain):
        shutil.copytree(DATA / "libero_l1", one)
    exact = _quantize(
        folder, eight_bit if kind == "int8" else lambda one: four_bit(one, "nf4", kind == "double", 64)
    )
    for file in plain.glob("*.safetensors"):
        save_file({key: exact[key].clone() for key in load_file(file)}, file)
    case = cases("libero_l1")[0]
    expected = answer(loaded("libero_l1", plain), "libero_l1", case).normalized
    found = answer(loaded("libero_l1", folder), "libero_l1", case).normalized
    np.testing.assert_array_equal(found, expected)
    assert np.abs(found - case["normalized"]).max() > 1e-3
    merged = [loaded("libero_l1", ADAPTER, base=str(base)) for base in (plain, folder)]  # QLoRA's
    trained, ours = (answer(policy, "libero_l1", case).normalized for policy in merged)
    np.testing.assert_array_equal(ours, trained)
    assert np.abs(ours - found).max() > 0.05
    convert(folder, tmp_path / "converted")
    assert "quantization_config" not in json.loads((tmp_path / "converted" / "config.json").read_text())
    again = answer(loaded("libero_l1", tmp_path / "converted"), "libero_l1", case).normalized
    np.testing.assert_array_equal(again, expected)


@pytest.mark.parametrize(
    ("said", "refused"),
    [
        ({"quant_method": "gptq", "bits": 4}, "quant_method: found 'gptq', expected 'bitsandbytes'"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_skip_modules": ["3"]},
         "1 weights are quantised although llm_int8_skip_modules has them: 3.weight"),
        ({"quant_method": "bitsandbytes", "newest": 3}, "newest: 3"),
    ],
)  # fmt: skip
def test_a_configuration_that_does_not_fit_is_refused(said, refused, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": said}))
    tensors = {key: one for key, one in load_file(FILE).items() if not key.startswith("expected.")}
    with pytest.raises(CheckpointError, match=refused):
        read(tmp_path, tensors)


def test_unquantised_weights_that_are_said_to_be_quantised_are_refused(tmp_path):
    said = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    (tmp_path / "config.json").write_text(json.dumps(said))
    with pytest.raises(CheckpointError, match="says that weights are quantised, but none is"):
        read(tmp_path, {"x.weight": torch.ones(2, 2)})


@pytest.mark.parametrize(
    ("lost", "refused"),
    [
        ("0.weight.absmax", "0.weight: its quant_state .* lacks '0.weight.absmax'"),
        ("3.weight.nested_absmax", "3.weight: its quant_state .* lacks '3.weight.nested_absmax'"),
        ("int8.weight", "int8.SCB: found scales, but int8.weight is no int8 matrix"),
    ],
)
def test_parts_that_are_missing_are_named(lost, refused, tmp_path):
    tensors = {key: one for key, one in load_file(FILE).items() if not key.startswith("expected.") and key != lost}
    with pytest.raises(CheckpointError, match=refused):
        read(tmp_path, tensors)


def test_another_layout_of_int8_is_refused(tmp_path):
    tensors = {key: one for key, one in load_file(FILE).items() if key.startswith("int8.")}
    with pytest.raises(CheckpointError, match="a layout of an old bitsandbytes"):
        read(tmp_path, tensors | {"int8.weight_format": torch.tensor(1, dtype=torch.uint8)})
