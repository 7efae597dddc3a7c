"""``policy.name: auto`` is the policy that the checkpoint names; another one is refused before anything else."""

import json
from pathlib import Path
from typing import Any

import pytest

from vla_ros.cli.main import main
from vla_ros.config import build, load
from vla_ros.config.checkpoints import SHIPPED, base_folder, identify
from vla_ros.errors import CheckpointError, ConfigError
from vla_ros.policies.base import create

CONFIGS: dict[str, dict[str, Any]] = {
    "pi": {"type": "pi05", "input_features": {}},
    "smolvla": {"type": "smolvla", "input_features": {}},
    "groot": {"model_type": "Gr00tN1d7"},
    "lerobot": {"type": "act", "input_features": {}},
    "openvla": {"model_type": "openvla"},
}


def write(folder: Path, config: Any, name: str = "config.json") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(config if isinstance(config, str) else json.dumps(config))
    return folder


@pytest.mark.parametrize(("policy", "config"), [*CONFIGS.items(), ("pi", {"action_horizon": 50})])
def test_the_checkpoint_names_its_policy(policy: str, config: dict[str, Any], tmp_path: Path) -> None:
    assert identify(str(write(tmp_path, config))).name == policy
    assert load((), [f"policy.checkpoint:={tmp_path}"]).policy.name == policy
    assert build({"policy.name": "auto", "policy.checkpoint": str(tmp_path)}).policy.name == policy


def test_shipped_checkpoints_name_theirs() -> None:
    assert {name: load((), [f"policy.checkpoint:={name}"]).policy.name for name in SHIPPED} == SHIPPED


@pytest.mark.parametrize("marked", ["component", "index", "single file"])
def test_an_action_head_makes_it_oft(marked: str, tmp_path: Path) -> None:
    folder = write(tmp_path, CONFIGS["openvla"])
    if marked == "component":
        (folder / "action_head--1_checkpoint.pt").touch()
    elif marked == "index":
        write(folder, {"weight_map": {"action_head.fc1.weight": "x"}}, "model.safetensors.index.json")
    else:
        import numpy as np
        from safetensors.numpy import save_file

        save_file({"action_head.fc1.weight": np.zeros(1)}, str(folder / "model.safetensors"))
    assert load((), [f"policy.checkpoint:={folder}", "policy.chunk:=8"]).policy.name == "oft"


def test_a_stale_index_does_not_make_it_oft(tmp_path: Path) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    folder = write(tmp_path, CONFIGS["openvla"])
    write(folder, {"weight_map": {"action_head.fc1.weight": "x"}}, "model.safetensors.index.json")
    save_file({"projector.fc1.weight": np.zeros(1)}, str(folder / "model.safetensors"))
    assert identify(str(folder)).name == "openvla"


@pytest.mark.parametrize("policy", CONFIGS)
@pytest.mark.parametrize("chosen", CONFIGS)
def test_a_wrong_policy_is_answered_with_the_right_one(policy: str, chosen: str, tmp_path: Path) -> None:
    folder = write(tmp_path, CONFIGS[policy])
    assignments = [f"policy.name:={chosen}", f"policy.checkpoint:={folder}"]
    if chosen == policy or (chosen == "lerobot" and "input_features" in CONFIGS[policy]):
        assert load((), assignments).policy.name == chosen
        return
    with pytest.raises(ConfigError, match=rf"^policy\.name: {chosen} cannot run .*set policy\.name:={policy} or"):
        load((), assignments)


def test_it_is_the_first_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not a question about the robot, the features or the wrong policy's files."""
    folder = write(tmp_path, CONFIGS["pi"])
    assert main(["run", "--dry-run", "-p", "policy.name:=openvla", "-p", f"policy.checkpoint:={folder}"]) == 1
    assert capsys.readouterr().err.startswith("vla-ros run: policy.name: openvla cannot run ")


def test_a_checkpoint_for_a_policy_that_takes_none(tmp_path: Path) -> None:
    folder = write(tmp_path, CONFIGS["smolvla"])
    with pytest.raises(ConfigError, match=r"'wiggle' .* runs no checkpoint; .* set policy\.name:=smolvla, or auto"):
        load((), ["policy.name:=wiggle", f"policy.checkpoint:={folder}"])


def test_a_file_without_a_policy_keeps_its_checkpoint(tmp_path: Path) -> None:
    folder, file = write(tmp_path / "folder", CONFIGS["smolvla"]), tmp_path / "robot.yaml"
    file.write_text(f"/**:\n  ros__parameters:\n    policy: {{checkpoint: {folder}, flow_steps: 5}}\n")
    for assignments in ([], ["policy.name:=smolvla"], ["policy.name:=auto"]):
        policy: Any = load([file], assignments).policy
        assert (policy.name, policy.checkpoint, policy.flow_steps) == ("smolvla", str(folder), 5)


def test_without_a_checkpoint_there_is_no_policy() -> None:
    config = load()
    assert config.policy.name == "auto"
    with pytest.raises(ConfigError, match=r"auto without policy\.checkpoint.* one of .*hold.*wiggle"):
        create(config)


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, "has no config.json, which names the policy; found nothing"),
        ({"config.json": "{ half"}, "not readable as JSON"),
        ({"config.json": "[]"}, "found list, expected a JSON object"),
        ({"config.json": "version https://git-lfs.github.com/spec/v1\noid sha256:0\n"}, "git lfs pull"),
        ({"config.json": '{"type": "act"}'}, r"no policy runs .* has \{'type': 'act'\}, expected 'type' with"),
        ({"config.json": '{"model_type": "llava"}'}, r"no policy runs .*'model_type': 'llava'"),
        ({"pretrained_model/config.json": "{}"}, "set policy.checkpoint to .*/pretrained_model"),
        (
            {"checkpoints/last/pretrained_model/config.json": "{}"},
            "set .* to .*/last/pretrained_model",
        ),
        ({"adapter_config.json": '{"peft_type": "LORA"}'}, "a LoRA adapter; set policy.base"),
        (
            {"adapter_config.json": '{"base_model": "m"}'},
            r"has \['base_model'\] and no peft_type, so it is no adapter",
        ),
        ({"params/_METADATA": "{}"}, "openpi's JAX format"),
        ({"assets/droid/norm_stats.json": "{}", "model.safetensors": ""}, "openpi's training output"),
    ],
)
def test_what_no_policy_claims_is_refused_with_what_was_looked_for(
    files: dict[str, str], said: str, tmp_path: Path
) -> None:
    for name, text in files.items():
        write((tmp_path / name).parent, text, Path(name).name)
    with pytest.raises(ConfigError, match=said):
        load((), [f"policy.checkpoint:={tmp_path}"])


def test_two_equal_claims_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vla_ros_models import pi, smolvla

    folder = write(tmp_path, CONFIGS["pi"])
    monkeypatch.setattr(smolvla, "SMOLVLA", pi.PI)  # the entry point of another policy for the same checkpoints
    with pytest.raises(ConfigError, match=r"policy\.name: pi and smolvla can both run .* set policy\.name to one"):
        load((), [f"policy.checkpoint:={folder}"])
    assert load((), [f"policy.checkpoint:={folder}", "policy.name:=pi"]).policy.name == "pi"


def test_an_adapter_is_of_its_base_models_policy(tmp_path: Path) -> None:
    adapter, base = write(tmp_path / "a", {}, "adapter_config.json"), write(tmp_path / "b", CONFIGS["openvla"])
    assert load((), [f"policy.checkpoint:={adapter}", f"policy.base:={base}"]).policy.name == "openvla"


@pytest.mark.parametrize(
    ("name", "said"), [("", "names none"), ("openvla/openvla-7b", "names openvla/openvla-7b, which is")]
)
def test_an_adapter_needs_its_base_model(name: str, said: str, tmp_path: Path) -> None:
    adapter = write(tmp_path, {"base_model_name_or_path": name}, "adapter_config.json")
    write(adapter, "", "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match=rf"a LoRA adapter; set policy\.base .*{said}"):
        base_folder(adapter)


def test_an_adapter_names_its_base_model(tmp_path: Path) -> None:
    base = write(tmp_path / "base", CONFIGS["openvla"])
    (base / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")  # no tensors
    adapter = write(tmp_path / "adapter", {"base_model_name_or_path": "../base"}, "adapter_config.json")
    write(adapter, "", "adapter_model.safetensors")
    assert base_folder(adapter) == adapter / "../base"
    assert identify(str(adapter)).name == "openvla"
    nested = write(tmp_path / "run/lora_adapter", {"base_model_name_or_path": str(base)}, "adapter_config.json")
    write(nested, "", "adapter_model.safetensors")
    assert base_folder(tmp_path / "run") == base
    write(tmp_path / "run", "", "model.safetensors")  # merged, as OpenVLA-OFT saves both
    assert base_folder(tmp_path / "run") is None
