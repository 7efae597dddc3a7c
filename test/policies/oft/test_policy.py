"""The policy and its checkpoints: sessions, variants, adapters and refused files."""

import json
import pickle
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from test.policies.golden import edit_json
from vla_ros.cli.main import main
from vla_ros.config import Config
from vla_ros.errors import CheckpointError, ConfigError, ImageError
from vla_ros.kinematics.urdf import resolve
from vla_ros.policies import create
from vla_ros.types import Observation
from vla_ros_models.oft import OFTOptions
from vla_ros_models.oft.network import Denoising, Layout, plan_sequence
from vla_ros_models.oft.policy import OFTPolicy
from vla_ros_models.openvla import OpenVLAOptions
from vla_ros_models.openvla.policy import OpenVLAPolicy

from .conftest import DATA, answer, cases, loaded, make_policy, observe


@pytest.fixture
def folder(tmp_path):
    """A copy of the L1 checkpoint that a test may damage."""
    return shutil.copytree(DATA / "libero_l1", tmp_path / "checkpoint")


def component(folder, name):
    return next(folder.glob(f"{name}--*.pt"))


def rewrite(folder, name, change):
    """Apply ``change`` to a component's tensors."""
    file = component(folder, name)
    torch.save(change(torch.load(file, weights_only=True)), file)


class Code:
    def __reduce__(self):
        return (print, ("code ran",))


def head(change):
    """Apply ``change`` to the file of the action head."""
    return lambda folder: change(component(folder, "action_head"))


def _narrow(folder):
    rewrite(folder, "proprio_projector", lambda all_: {k: v[:40] if v.ndim else v for k, v in all_.items()})


def _other_width(folder):
    rewrite(folder, "action_head", lambda all_: {k: v[:6] if "fc2" in k else v for k, v in all_.items()})


def _noise_head(folder):
    noise = "module.noise_predictor.mlp_resnet"
    rewrite(folder, "action_head", lambda all_: {k.replace("module.model", noise): v for k, v in all_.items()})


def _statistics(change):
    def each(content):
        for entry in content.values():
            change(entry)

    return lambda folder: edit_json(folder / "dataset_statistics.json", each)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (head(lambda file: torch.save({"weight": Code()}, file)), "contains objects other than tensors"),
        (
            head(lambda file: file.write_bytes(pickle.dumps({"w": Code()}, protocol=2))),
            "objects other than tensors",
        ),
        (head(lambda file: file.rename(file.with_name("touch--1_checkpoint.pt"))), r"components \['touch"),
        (head(lambda file: file.rename(file.with_name("action_head_checkpoint.pt"))), r"\['action_head_checkpoint"),
        (head(lambda file: shutil.copy(file, file.with_name("action_head--2_checkpoint.pt"))), "one action_head"),
        (_narrow, "proprio_projector.fc2.weight is"),
        (_other_width, "action_head.fc2.weight is"),
        (_noise_head, "without its projector"),
        (_statistics(lambda entry: entry.pop("proprio")), "proprio of '.*': no"),
        (_statistics(lambda entry: entry["proprio"].update(q01=[0.0], q99=[1.0])), "takes 8 numbers"),
        (head(lambda file: file.write_bytes(b"PK")), "not readable|other than tensors"),
        (lambda folder: (folder / "model-00002-of-00002.safetensors").unlink(), "missing shards"),
    ],
)
def test_files_that_do_not_fit_are_refused(folder, damage, said, capsys):
    damage(folder)
    with pytest.raises(CheckpointError, match=said):
        loaded("libero_l1", folder)
    assert "code ran" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"chunk": 0}, "policy.chunk"),
        ({"images": 3, "cameras": 2}, "policy.images: the checkpoint takes 3"),
        ({"unnorm_key": "kitchen"}, "no dataset 'kitchen'"),
        ({"quantization": "fp8", "dtype": "auto", "engine": "reference"}, "policy.engine reference"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, said):
    with pytest.raises(ConfigError, match=said):
        loaded("libero_l1", **options)


def test_missing_inputs_are_refused():
    policy, case = loaded("libero_l1"), cases("libero_l1")[0]
    good = observe(policy, "libero_l1", case)
    one = dict(list(good.images.items())[:1])
    with pytest.raises(ImageError, match="camera_1"):
        policy.infer(policy.start_session(), Observation(one, good.instruction, 0, state=good.state))
    with pytest.raises(ConfigError, match=r"features\.state"):
        policy.infer(policy.start_session(), Observation(good.images, good.instruction, 0))


def test_the_registry_creates_the_policy_with_the_checkpoints_spec():
    assert isinstance(create(Config(policy=OFTOptions(name="oft"))), OFTPolicy)
    policy = loaded("aloha_film")
    assert policy.spec.image_keys == ("camera_0", "camera_1", "camera_2")
    assert (policy.spec.dimension, policy.spec.horizon, policy.spec.state[0].size) == (14, 25, 14)


@pytest.mark.parametrize("variant", ["libero_l1", "libero_diffusion", "aloha_film"])
def test_describe_equals_the_loaded_spec(variant):
    policy = make_policy(variant, self_test=False, denoising_steps=1)
    known = policy.describe()
    assert known.horizon > 1
    policy.load()
    assert policy.spec == known


def test_a_dry_run_shows_state_and_chunk(capsys):
    words = ["run", "--dry-run", "-p", "preset:=libero", "-p", f"policy.checkpoint:={DATA / 'libero_l1'}"]
    arm = resolve("demo")
    words += ["-p", f"robot.urdf:={arm}", "-p", "robot.gripper_joint_names:=[finger_left, finger_right]"]
    assert main(words) == 1, "preset libero asks what its deltas are"
    assert "control.delta_form: choose goal or motion" in capsys.readouterr().err
    assert main([*words, "-p", "control.delta_form:=motion"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "rate: 20 Hz (trained at 20 Hz), 8 of 8 steps of a chunk executed" in shown
    assert "arm.fingers[m, -m] 2" in shown
    assert "(checkpoint)" in shown  # the middle of its statistics
    assert "action chunk 8" in shown


def test_a_model_that_ignores_its_images_is_refused(folder):
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        save_file({k: v * 0 if k.startswith("projector.") else v for k, v in tensors.items()}, file)
    with pytest.raises(CheckpointError, match="does not see"):
        loaded("libero_l1", folder)


def test_noise_follows_the_seed():
    case = cases("libero_diffusion")[1]
    policy = loaded("libero_diffusion", seed=3, denoising_steps=2)
    seen = replace(observe(policy, "libero_diffusion", case), noise=None)
    first, second = policy.start_session(), policy.start_session()
    chunks = [policy.infer(session, seen).actions for session in (first, second, second)]
    np.testing.assert_array_equal(chunks[0], chunks[1])
    assert np.abs(chunks[1] - chunks[2]).max() > 1e-3


def _adapter(folder, base, rank=4, width=None):
    """Write a LoRA adapter for two layers of ``base``; returns the merged weights."""
    generator = torch.Generator().manual_seed(1)
    weights = {key: value for file in base.glob("*.safetensors") for key, value in load_file(file).items()}
    merged, pairs = {}, {}
    for key in ("language_model.model.layers.0.self_attn.q_proj.weight", "projector.fc1.weight"):
        out, inputs = weights[key].shape
        a = torch.randn(rank, width or inputs, generator=generator)
        b = torch.randn(out, rank, generator=generator)
        name = f"base_model.model.{key.removesuffix('.weight')}"
        pairs |= {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}
        merged[key] = weights[key].float() + 0.5 * b @ a if width is None else None
    folder.mkdir(exist_ok=True)
    save_file(pairs, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank / 2, "base_model_name_or_path": "some/base"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return merged


def test_an_adapter_is_merged_in_float32(folder, tmp_path):
    merged = _adapter(folder / "lora_adapter", folder)
    policy = loaded("libero_l1", folder, base=str(folder))
    parameters = dict(policy.loaded.model.named_parameters())
    for name, expected in merged.items():
        torch.testing.assert_close(parameters[name].data, expected)
    case = cases("libero_l1")[0]
    changed = answer(policy, "libero_l1", case).normalized
    assert np.abs(changed - case["normalized"]).max() > 1e-2
    # Without policy.base the shards are final: published checkpoints keep their adapter beside merged weights.
    plain = loaded("libero_l1", folder)
    np.testing.assert_allclose(answer(plain, "libero_l1", case).normalized, case["normalized"], atol=1e-4)
    assert main(["convert", str(folder), "--base", str(folder), "--output", str(tmp_path / "out")]) == 0
    again = loaded("libero_l1", tmp_path / "out")
    np.testing.assert_array_equal(answer(again, "libero_l1", case).normalized, changed)


def test_an_adapter_of_another_base_is_refused(folder):
    _adapter(folder / "lora_adapter", folder, width=40)
    with pytest.raises(CheckpointError, match="trained on some/base"):
        loaded("libero_l1", folder, base=str(folder))


def test_openvla_merges_an_adapter_folder(folder, tmp_path):
    for file in folder.glob("*.pt"):
        file.unlink()
    merged = _adapter(tmp_path / "adapter", folder)
    options = {"checkpoint": str(tmp_path / "adapter"), "device": "cpu", "unnorm_key": ""}
    policy = OpenVLAPolicy(Config(policy=OpenVLAOptions(**options, base=str(folder))))
    policy.load()
    parameters = dict(policy.loaded.model.named_parameters())
    for name, expected in merged.items():
        torch.testing.assert_close(parameters[name].data, expected)
    assert policy.other_statistics(np.zeros((1, 7))) == {}  # the statistics are the base model's, too
    with pytest.raises(CheckpointError, match="LoRA adapter"):
        OpenVLAPolicy(Config(policy=OpenVLAOptions(**options))).load()


def test_the_layout_of_a_sequence_is_that_of_training():
    layout = Layout(images=1, chunk=1, action=2, state=3, head="diffusion", film=False)
    made = plan_sequence(layout, patches=4, text=5, prompt=3, size=14)
    # Rows: zero, 5 text tokens, 4 patches, state, timestep, 2 noisy numbers.
    bos, patches, state, time, words, noisy, end, padding = 1, [6, 7, 8, 9], 10, 11, [2, 3], [12, 13], 4, [0, 0]
    assert made.order.tolist() == [bos, *patches, state, time, *words, *noisy, end, *padding]
    assert made.length == 12
    assert made.wanted.tolist() == [8, 9]  # the last word, the first placeholder


@pytest.mark.parametrize(
    ("steps", "times"), [(50, range(49, -1, -1)), (10, range(45, -1, -5)), (25, range(48, -1, -2))]
)
def test_denoising_steps_are_spaced_as_by_the_scheduler(steps, times):
    table = Denoising.of(steps, 8)
    np.testing.assert_allclose(table.times[:, 0], np.sin(list(times)), atol=1e-5)
    assert table.alphas[-1, 1] == 1.0
    assert (table.alphas[1:, 0] == table.alphas[:-1, 1]).all()


@pytest.mark.parametrize(("variant", "preset"), [("libero_l1", "libero"), ("aloha_film", "aloha")])
def test_a_preset_supplies_the_missing_settings(variant, preset, tmp_path):
    case = cases(variant)[0]
    words = ["infer", "--checkpoint", str(DATA / variant), "-p", f"preset:={preset}", "-p", "policy.device:=cpu"]
    for index in range(3 if preset == "aloha" else 2):
        Image.fromarray(case[f"image_{index}"]).save(tmp_path / f"{index}.png")
        words += ["--image", str(tmp_path / f"{index}.png")]
    words.append("--state=" + ",".join(map(repr, case["proprio"].tolist())))
    words += ["--instruction", str(case["instruction"]), "--json", str(tmp_path / "out.json")]
    assert main(words) == 0
    result = json.loads((tmp_path / "out.json").read_text())
    np.testing.assert_allclose(result["normalized"], case["normalized"], atol=1e-4)
    actions, expected = np.array(result["actions"]), case["action"].copy()
    if preset == "libero":  # the preset's gripper opens at -1
        expected[:, 6] = 1 - 2 * expected[:, 6]
    np.testing.assert_allclose(actions, expected, atol=2e-4)


def test_a_preset_of_another_robot_is_refused(capsys):
    words = ["infer", "--checkpoint", str(DATA / "libero_l1"), "-p", "preset:=aloha", "--instruction", "x"]
    assert main(words) == 1
    assert "aloha has actions of 14 numbers" in capsys.readouterr().err
