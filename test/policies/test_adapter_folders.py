"""Folders with adapters, as LeRobot and plain peft save them, of every family (see ``data/adapters/README.md``)."""

import json
import shutil

import numpy as np
import pytest

pytest.importorskip("torch", reason="the library torch is not installed (extra 'openvla')")

from PIL import Image
from safetensors.torch import load_file, save_file

from test.policies.adapter_cases import CASES, DATA, base_of, check, observation_of, own_actions
from test.policies.golden import edit_json
from test.policies.oft import conftest as oft
from vla_ros.cli.main import main
from vla_ros.errors import CheckpointError, ConfigError
from vla_ros_models.adapters import read_merged
from vla_ros_models.convert import convert
from vla_ros_models.oft.inference import ChunkRequest

OTHER = {"pi05": "smolvla", "pi0": "groot", "smolvla": "pi05", "groot": "pi0"}


@pytest.fixture
def made(tmp_path):
    """Makes an adapter and its base model, and reads what LeRobot answered."""

    def make(name):
        shutil.copytree(DATA / name, tmp_path / "adapter")
        with np.load(DATA / f"{name}.npz") as file:
            return tmp_path / "adapter", base_of(name, tmp_path), dict(file)

    return make


@pytest.mark.parametrize("name", CASES)
def test_actions_and_weights_equal_lerobots(made, name):
    adapter, base, answers = made(name)
    np.testing.assert_allclose(answers["merged"], answers["adapted"], rtol=0, atol=1e-4)  # LeRobot's own
    check(name, adapter, base, answers)


@pytest.mark.parametrize("name", CASES)
def test_a_converted_adapter_is_a_checkpoint_of_its_own(made, name, tmp_path):
    adapter, base, answers = made(name)
    words = ["convert", str(adapter), "--base", str(base), "--output", str(tmp_path / "out")]
    assert main(words) == 0
    assert not list((tmp_path / "out").glob("adapter*"))
    assert not json.loads((tmp_path / "out" / "config.json").read_text()).get("use_peft")
    shutil.rmtree(adapter)
    options = [f"policy.base_model:={tmp_path / 'two'}"] if name == "groot" else []
    shutil.rmtree(base)
    np.testing.assert_allclose(own_actions(name, tmp_path / "out", *options), answers["adapted"], rtol=0, atol=3e-4)


def test_converted_weights_have_the_type_that_is_asked_for(made, tmp_path):
    adapter, base, _ = made("pi05")
    convert(adapter, tmp_path / "float32", base)
    convert(adapter, tmp_path / "bfloat16", base, "bfloat16")
    exact, short = (load_file(tmp_path / name / "model.safetensors") for name in ("float32", "bfloat16"))
    import torch

    assert exact.keys() == short.keys()
    assert all(torch.equal(one.bfloat16(), short[name]) for name, one in exact.items())


@pytest.mark.parametrize("name", CASES)
def test_plain_peft_folders_take_the_rest_from_their_base(made, name):
    """``PeftModel.save_pretrained`` writes two files; the base is the folder that ``adapter_config.json`` names."""
    adapter, _, answers = made(name)
    for path in adapter.iterdir():
        if not path.name.startswith("adapter_"):
            path.unlink()
    edit_json(adapter / "adapter_config.json", lambda one: one.update(base_model_name_or_path="../base"))
    np.testing.assert_allclose(own_actions(name, adapter), answers["adapted"], rtol=0, atol=3e-4)


def test_chunks_equal_those_of_openvla_ofts_training_code(tmp_path):
    """An adapter on all linear layers, one convolution and the output layer; the head is the base model's."""
    with np.load(DATA / "oft.npz") as file:
        answers = dict(file)
    policy = oft.loaded("libero_l1", DATA / "oft", base=str(oft.DATA / "libero_l1"), self_test=False)
    network = policy.loaded
    for images, ids, labels, state, expected in zip(*answers.values(), strict=True):
        prompt = ids[: np.flatnonzero(labels != -100)[0]].astype(np.int64)
        prompt[-1] = network.model.architecture.empty_token  # the small vocabulary has its own
        resized = [np.kron(image, np.ones((4, 4, 1), np.uint8)) for image in images]
        chunk = network.engine.answer(ChunkRequest(resized, prompt, state))
        np.testing.assert_allclose(chunk.normalized, expected, rtol=0, atol=2e-5)


def test_commands_take_an_adapters_folder(made, tmp_path, capsys):
    adapter, base, _ = made("pi05")
    edit_json(adapter / "adapter_config.json", lambda one: one.update(base_model_name_or_path=str(base)))
    images, state, prompt, _ = observation_of("pi05")
    words = ["infer", "--checkpoint", str(adapter), "-p", "policy.device:=cpu"]
    for number, image in enumerate(images.values()):
        Image.fromarray(image).save(tmp_path / f"{number}.png")
        words += ["--image", str(tmp_path / f"{number}.png")]
    assert main([*words, "--state=" + ",".join(map(str, state)), "--instruction", prompt]) == 0
    capsys.readouterr()
    words = ["-p", f"policy.checkpoint:={adapter}", "-p", "preset:=libero", "-p", "camera.keys:=[image, image2]"]
    words += ["-p", "features.state:=['state = unused[8]']", "-p", "control.delta_form:=goal"]
    words += ["-p", "control.output:=twist_stamped"]
    assert main(["run", "--dry-run", *words]) == 0
    assert f"policy: pi ({adapter}" in capsys.readouterr().out


def _damage(adapter, lost):
    file = adapter / "adapter_model.safetensors"
    save_file({key: one for key, one in load_file(file).items() if lost not in key}, file)


@pytest.mark.parametrize("name", CASES)
def test_an_adapter_of_another_family_is_refused(made, name, tmp_path):
    adapter, _, _ = made(name)
    other = base_of(OTHER[name], tmp_path / "other")
    with pytest.raises(CheckpointError, match=r"tensors do not fit the base model: .* trained on lerobot/base"):
        read_merged(adapter, other)


def test_usual_mistakes_are_explained(made, tmp_path):
    adapter, base, _ = made("pi05")
    file = adapter / "adapter_model.safetensors"
    with pytest.raises(CheckpointError, match=r"a LoRA adapter; set policy\.base .* lerobot/base, which is no"):
        own_actions("pi05", adapter)
    with pytest.raises(ConfigError, match=r"policy\.base: .*nowhere is no folder"):
        own_actions("pi05", adapter, "policy.base:=/nowhere")
    edit_json(adapter / "adapter_config.json", lambda one: one.update(r=8))
    with pytest.raises(CheckpointError, match=r"r: found 8, but the adapter's matrices .* have rank 4"):
        read_merged(adapter, base)
    edit_json(adapter / "adapter_config.json", lambda one: one.update(r=4))
    kept = load_file(file)
    _damage(adapter, "action_in_proj.lora_B")
    with pytest.raises(CheckpointError, match=r"action_in_proj: lora_A\.weight \[4, 32\] do not fit"):
        read_merged(adapter, base)
    save_file({key: one[:, :16].clone() if "lora_A" in key else one for key, one in kept.items()}, file)
    with pytest.raises(CheckpointError, match=r"lora_A\.weight \[4, 16\].* do not fit the base model's weight \["):
        read_merged(adapter, base)
    file.unlink()
    with pytest.raises(CheckpointError, match=r"neither .*adapter nor its lora_adapter has adapter_model"):
        read_merged(adapter, base)
    with pytest.raises(CheckpointError, match=r"use_peft: an adapter's, but the folder has no adapter_model"):
        own_actions("pi05", adapter)


def test_layers_without_weights_in_the_adapter_are_named(made, caplog):
    """Peft itself only warns, and leaves such layers as in the base model."""
    adapter, base, _ = made("pi05")
    _damage(adapter, "action_in_proj")
    edit_json(adapter / "adapter_config.json", lambda one: one.update(modules_to_save=["state_proj"]))
    read_merged(adapter, base)
    assert (
        "2 modules of adapter_config.json have no weights in the adapter: state_proj, model.action_in_proj"
        in caplog.text
    )


def test_weights_beside_an_adapter_are_not_guessed_to_be_merged(made, tmp_path):
    adapter, base, answers = made("pi05")
    shutil.copy(base / "model.safetensors", adapter)
    with pytest.raises(CheckpointError, match=r"found weights and the adapter .* set policy\.base to this folder"):
        own_actions("pi05", adapter)
    shutil.copytree(base / "tokenizer", adapter / "tokenizer")
    shutil.copy(base / "architecture.json", adapter)
    ours = own_actions("pi05", adapter, f"policy.base:={adapter}")
    np.testing.assert_allclose(ours, answers["adapted"], rtol=0, atol=3e-4)
    edit_json(adapter / "adapter_config.json", lambda one: one.update(base_model_name_or_path="."))
    np.testing.assert_array_equal(own_actions("pi05", adapter), ours)
