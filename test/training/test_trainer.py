"""Training runs: what trains, resuming, several processes, and what goes wrong."""

import argparse
import json
import multiprocessing
import os
import shutil
import socket
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="the library torch is not installed (extra 'openvla')")
pytest.importorskip("accelerate", reason="the library accelerate is not installed (extra 'train')")
pytest.importorskip("peft", reason="the library peft is not installed (extra 'train')")

import torch
from safetensors.torch import load_file

from test.training.runs import CPU, OPTIONS, PART, SMOLVLA, ArmSamples, opened, policy_of, run, stream_of
from tools import forks
from vla_ros.cli.main import main
from vla_ros.config import load
from vla_ros.contract.features import complete_spec
from vla_ros.contract.spec import PolicySpec
from vla_ros.errors import ConfigError, VlaRosError
from vla_ros.policies.base import Policy
from vla_ros.types import ActionChunk
from vla_ros_lab.replay.compare import SCHEMA
from vla_ros_lab.training import proof, state
from vla_ros_lab.training.export import export
from vla_ros_lab.training.finetune import FineTuning, add_training_arguments, finetune
from vla_ros_lab.training.recipes import recipe_of
from vla_ros_lab.training.samples import Sample
from vla_ros_lab.training.stream import SampleStream
from vla_ros_lab.training.trainer import TrainOptions, train
from vla_ros_models import evidence

ROOT = Path(__file__).parents[2]
DEMO_PI = [ROOT / "config" / f"{name}.yaml" for name in ("demo", "demo_pi")]


@pytest.mark.parametrize(
    ("family", "adapter"),
    [("smolvla", "full"), ("smolvla", "qlora"), ("openvla", "lora"), ("openvla", "qlora"), ("oft", "lora"),
     ("pi05", "full"), ("pi05", "lora"), ("groot", "full"), ("groot", "lora")],
)  # fmt: skip
def test_what_is_exported_is_what_was_trained(tmp_path, family, adapter):
    adapted = opened(family, adapter)
    before = {name: one.detach().clone() for name, one in adapted.parameters.items()}
    found = run(adapted, tmp_path / "run", 2)
    assert len(found.losses) == 2
    assert any(not torch.equal(before[name], one) for name, one in adapted.parameters.items())
    folder, settings = OPTIONS[family]
    export(adapted, folder, tmp_path / "out", "float32")
    again = policy_of(tmp_path / "out", *settings).trainable(CPU)
    samples = ArmSamples(again.spec)
    batch = again.inputs.collate(
        [again.inputs.prepare(one.observation, one.actions, one.is_pad, np.random.default_rng(1))
         for one in (samples[0], samples[20])]
    )  # fmt: skip
    with torch.no_grad():
        trained = adapted.trainable.trainee(batch).total.item()
        exported = again.trainee(batch).total.item()
    assert exported == pytest.approx(trained, rel=2e-5)
    assert (tmp_path / "out" / "adapter" / "adapter_model.safetensors").exists() == (adapter != "full")
    frozen = [name for name in again.stored if name not in {*adapted.whole.values()}]
    assert adapter == "qlora" or len(frozen) > 0 or family == "pi05"


def test_peft_merges_the_adapter_as_the_export_does(tmp_path):
    """The adapter's folder, merged by hand as peft's documentation says, gives the exported weights."""
    adapted = opened("smolvla", "lora")
    run(adapted, tmp_path / "run", 2)
    export(adapted, SMOLVLA, tmp_path / "out", "float32")
    adapter = load_file(tmp_path / "out" / "adapter" / "adapter_model.safetensors")
    config = json.loads((tmp_path / "out" / "adapter" / "adapter_config.json").read_text())
    base, merged = load_file(SMOLVLA / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    layers = {name.removesuffix(".lora_A.weight") for name in adapter if ".lora_A." in name}
    assert layers
    for layer in layers:
        name = f"{layer.removeprefix('base_model.model.')}.weight"
        delta = adapter[f"{layer}.lora_B.weight"] @ adapter[f"{layer}.lora_A.weight"]
        wanted = base[name].float() + config["lora_alpha"] / config["r"] * delta
        np.testing.assert_allclose(merged[name].numpy(), wanted.numpy(), atol=1e-6)
        assert name.removesuffix(".weight") in config["target_modules"]
    unchanged = base.keys() - {f"{layer.removeprefix('base_model.model.')}.weight" for layer in layers}
    assert all(torch.equal(base[name].float(), merged[name].float()) for name in unchanged)


def test_accumulated_batches_are_one_large_batch(tmp_path):
    """Without padding in the loss, two batches of two are one of four."""
    whole = run(opened("pi05"), tmp_path / "whole", 3, batch=4)
    parts = run(opened("pi05"), tmp_path / "parts", 3, batch=2, accumulation=2)
    np.testing.assert_allclose(parts.losses, whole.losses, rtol=2e-5)


def test_workers_change_nothing(tmp_path, monkeypatch):
    default = multiprocessing.get_context("forkserver")  # since Python 3.14
    monkeypatch.setattr(multiprocessing.context._default_context, "_actual_context", default)
    assert run(opened(), tmp_path / "a", 2, workers=2).losses == run(opened(), tmp_path / "b", 2).losses


@pytest.mark.parametrize("at", [1, 3])
def test_a_resumed_run_is_an_unbroken_one_to_the_bit(tmp_path, at):
    unbroken = opened()
    expected = run(unbroken, tmp_path / "whole", 5)
    broken = opened()
    stream, options = stream_of(broken), TrainOptions(steps=5, batch=2, workers=0, learning_rate=1e-3, save_every=1)

    class Stopping:
        """Stops the run when its sample is asked for."""

        def prepare(self, *arguments):
            self.count = getattr(self, "count", 0) + 1
            if self.count > 2 * at:
                raise KeyboardInterrupt
            return broken.trainable.inputs.prepare(*arguments)

        collate = broken.trainable.inputs.collate

    recipe = recipe_of("smolvla", "")
    stopped = SampleStream(stream.samples, stream.episodes, Stopping(), 0)
    with pytest.raises(VlaRosError, match=f"after step {at} of 5"):
        train(broken, stopped, recipe, options, tmp_path / "broken", lambda line: None)
    resumed = opened()
    found = train(resumed, stream, recipe, options, tmp_path / "broken", lambda line: None)
    assert found.losses == expected.losses
    for name, one in unbroken.parameters.items():
        assert torch.equal(one, resumed.parameters[name]), name


def test_sharded_training_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ConfigError, match="ACCELERATE_USE_FSDP: is set"):
        run(opened(), tmp_path, 1)


def test_a_half_written_state_does_not_load(tmp_path, monkeypatch):
    adapted = opened()
    run(adapted, tmp_path, 1)

    def fail(*arguments, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(state, "save_file", fail)
    with pytest.raises(VlaRosError, match=r"step 2 could not be written.*No space"):
        run(adapted, tmp_path, 2)
    assert sorted(one.name for one in tmp_path.glob("*step-*")) == ["step-00000001"]


def test_a_full_disk_leaves_no_checkpoint_that_loads(tmp_path, monkeypatch):
    adapted = opened()
    monkeypatch.setattr(
        "vla_ros_lab.training.export.save_file",
        lambda *_, **__: (_ for _ in ()).throw(OSError(28, "No space left")),
    )
    with pytest.raises(VlaRosError, match="No space left"):
        export(adapted, SMOLVLA, tmp_path / "out")
    assert not (tmp_path / "out" / "config.json").exists()


@dataclass(frozen=True, eq=False)
class Damaged(ArmSamples):
    """Samples of which one has an action that is no number."""

    def __getitem__(self, index):
        sample = super().__getitem__(index)
        actions = sample.actions.copy()
        actions[0, 0] = np.nan if index == 9 else actions[0, 0]
        return Sample(sample.observation, actions, sample.is_pad, sample.episode, sample.frame)


@pytest.mark.parametrize("workers", [0, 1])
def test_numbers_that_are_none_are_named(tmp_path, workers):
    adapted = opened()
    samples = Damaged(adapted.trainable.spec)
    stream = SampleStream(samples, samples.episodes, adapted.trainable.inputs, 0)
    options = TrainOptions(steps=40, batch=2, workers=workers)
    with pytest.raises(VlaRosError, match=r"^episode 1, frame 2: its actions contain NaN") as told:
        train(adapted, stream, recipe_of("smolvla", ""), options, tmp_path, lambda line: None)
    assert "Traceback" not in str(told.value)


def arguments(*words):
    parser = argparse.ArgumentParser()
    add_training_arguments(parser)
    return parser.parse_args(
        [*words, "--batch", "2", "--workers", "0", "--device", "cpu", "--learning-rate", "1e-3"]
    )


def job(lengths=(6, 5, 7, 6, 5, 6, 7)):
    folder, settings = OPTIONS["pi05"]

    def reload(other):
        return policy_of(other, *settings)

    config = load(DEMO_PI, [f"policy.checkpoint:={folder}"])
    return FineTuning(
        reload(folder),
        folder,
        lambda spec: ArmSamples(complete_spec(spec, config), lengths),
        reload,
        {"samples": "0"},
        config,
    )


def test_the_whole_way(tmp_path):
    """Train, export, compare on held-out episodes, and the evidence of it, which scores complete."""
    out, lines = tmp_path / "out", []
    words = ("--output", str(out), "--steps", "3", "--hold-out", "0.8")
    found = finetune(job(), arguments(*words), lines.append)
    assert len(found["losses"]) == 3
    assert found["proof"]["basis"] == "recordings"
    assert found["proof"]["pairs"] == 6
    assert found["verdict"] in (proof.WORSE, proof.NO_CONTRADICTION)
    assert any("samples/s" in line for line in lines)
    assert list((out / "run" / "events").rglob("events*"))
    told = json.loads((out / "evidence" / "evidence.json").read_text())
    assert told["weights"]["model.safetensors"] == evidence.sha256(out / "model.safetensors")
    folder, _ = OPTIONS["pi05"]
    assert told["base"]["model.safetensors"] == evidence.sha256(folder / "model.safetensors")
    required = policy_of(out, "policy.evidence:=require")
    with pytest.raises(VlaRosError, match="closed loop"):
        required.load()
    for name in ("old", "new"):  # replay's own results, as `vla-ros compare` reads them
        replayed = json.loads((out / "evidence" / f"{name}.json").read_text())
        assert replayed["schema"] == SCHEMA
        assert replayed["frames"]["compared"] == sum((6, 5, 7, 6, 5, 6, 7)) - 6
    assert found["proof"]["differences"][0]["new"] == replayed["mae"]
    assert main(["compare", *(str(out / "evidence" / f"{name}.json") for name in ("old", "new"))]) == 0
    scores = ("--scores", *(str(tmp_path / f"{name}.json") for name in ("old", "new")))
    write_scores(tmp_path, evidence.digest_of(folder), evidence.digest_of(folder))
    with pytest.raises(ConfigError, match=r"new\.json: is of another checkpoint"):
        finetune(job(), arguments(*words, *scores), lines.append)
    write_scores(tmp_path, evidence.digest_of(folder), "")
    with pytest.raises(ConfigError, match=r"new\.json: does not say which"):
        finetune(job(), arguments(*words, *scores), lines.append)
    write_scores(tmp_path, evidence.digest_of(folder), evidence.digest_of(out))
    promoted = finetune(job(), arguments(*words, *scores), lines.append)
    assert promoted["verdict"] == proof.BETTER
    required.load()
    required.close()
    with (out / "config.json").open("a") as file:
        file.write("\n")
    with pytest.raises(VlaRosError, match=r"other files.*config\.json"):
        required.load()


def write_scores(folder, *digests):
    """Results of ``vla-ros eval`` of the old and the new checkpoint, of weights with these digests."""
    for name, won, digest in zip(("old", "new"), (3, 17), digests, strict=True):
        episodes = [{"episode_id": seed, "metrics": {"success": seed < won}} for seed in range(20)]
        content = {"tasks": [{"task": "pick", "episodes": episodes}], "config": {"weights": digest}}
        (folder / f"{name}.json").write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("adapter", "options", "said"),
    [
        (
            "lora",
            {"train": "lm_expert"},
            "--train lm_expert: fits the beginning of no parameter of a layer without",
        ),
        ("lora", {"targets": "nothing"}, "--targets nothing: fits the beginning of no layer; names are the check"),
        ("lora", {"targets": "("}, r"--targets \(: no regular expression"),
        ("full", {"train": "nothing"}, "--train nothing: fits"),
        ("full", {"rank": 8}, "--rank: --adapter full determines what trains"),
        ("full", {"targets": "x"}, "--targets: --adapter full determines"),
    ],
)
def test_an_option_that_would_change_nothing_is_refused(adapter, options, said):
    """A misspelt pattern trained the adapters alone, or what else there was, and nobody said so."""
    with pytest.raises(ConfigError, match=said):
        opened("smolvla", adapter, **options)


def test_another_run_does_not_resume(tmp_path):
    """Nor with another option or configuration that changes what is learned or held out."""
    began = ("--steps", "1", "--hold-out", "0")

    def again(*words: str, **changes: Any) -> Any:
        options = arguments("--output", str(tmp_path / "out"), *began, *words)
        return finetune(replace(job(), **changes), options, lambda line: None)

    again()
    turned = replace(job().config, camera=replace(job().config.camera, orientation=("rotate_90",)))
    for words, changes, found in (
        (("--seed", "1"), {}, "--seed differ"),
        (("--hold-out", "0.8"), {}, "--hold-out differ"),
        (("--augment", "none"), {}, "--augment differ"),
        (("--optimizer", "adamw8bit"), {}, "--optimizer differ"),
        ((), {"own_actions": True}, "--own-actions differ"),
        ((), {"config": turned}, "camera.orientation differ"),
    ):
        with pytest.raises(ConfigError, match=f"holds another run: {found}"):
            again(*words, **changes)
    again("--workers", "0", "--device", "cpu", "--save-every", "7")
    copied = shutil.copytree(job().folder, tmp_path / "copy")
    again(folder=copied)
    (copied / "preprocessor_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="holds another run: weights differ"):
        again(folder=copied)
    refused = job(), arguments("--output", str(tmp_path / "new"), "--adapter", "full", "--rank", "8")
    with pytest.raises(ConfigError, match="--rank"):
        finetune(*refused, lambda line: None)
    found = finetune(job(), arguments("--output", str(tmp_path / "new"), *began), lambda line: None)
    assert len(found["losses"]) == 1, "what was refused holds no folder"
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    with pytest.raises(ConfigError, match="is not empty"):
        finetune(job(), arguments("--output", str(tmp_path / "other")), lambda line: None)


class Missing(Policy):
    """Answers with the recorded action and an error, for some episodes in the wrong direction of the gripper."""

    def __init__(self, samples, error, gripper=()):
        self.spec, self.samples, self.error, self.gripper = samples.spec, samples, error, gripper

    def infer(self, session, observation):
        sample = self.samples[observation.stamp]
        actions = sample.actions + self.error * np.cos(3.0 * sample.episode + np.arange(7))
        if sample.episode in self.gripper:
            actions[:, 6] = 1 - actions[:, 6]
        return ActionChunk(actions, observation.stamp)


@dataclass(frozen=True, eq=False)
class TipSamples(ArmSamples):
    """Deltas of the tip and a gripper, one action at a time."""

    def __getitem__(self, index):
        sample = super().__getitem__(index)
        actions = 0.01 * sample.actions
        actions[:, 6] = (sample.frame % 4) > 1
        return Sample(sample.observation, actions, sample.is_pad, sample.episode, sample.frame)


def verdict(old, new, lengths=(9, 8, 7, 8, 9, 8)):
    samples = TipSamples(PolicySpec(images=()), lengths)
    config = load([], ["policy.name:=hold"])
    return proof.compare_replays(
        *(proof.replay_held_out(Missing(samples, *one), samples, samples.episodes, config) for one in (old, new))
    )


def test_verdicts():
    """Only scores can say better; few episodes say nothing; replay's own judgement counts."""
    assert verdict((0.004,), (0.002,)).verdict == proof.NO_CONTRADICTION
    found = verdict((0.002,), (0.004,))
    assert found.verdict == proof.WORSE
    assert [one.figure for one in found.differences if one.is_worse] == ["mae", "direction_cosine"]
    assert verdict((0.002,), (0.004,), (9, 8, 7)).verdict == proof.UNDECIDED
    found = verdict((0.0005,), (0.0005, (0, 1, 2, 3, 4, 5)))
    assert (found.verdict, "gripper" in found.reason) == (proof.WORSE, True)
    assert str(proof.Proof(proof.UNDECIDED, "none")).startswith("unknown: no episode")


RUNS = Path(__file__).with_name("runs.py")


def test_killed_runs_resume(tmp_path):
    """Processes that are killed while they start, train or write a state resume to the same losses, bit for bit."""
    forks.preload(*forks.TRAINING)
    variables, said = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}, tmp_path / "said"
    process = forks.Fork(
        forks.script, [str(RUNS), "kill", str(tmp_path), "3", "24"], tmp_path / "said", environment=variables
    )
    assert process.wait(240) == 0, said.read_text()
    assert "losses of 24 steps equal: True" in said.read_text()


def test_two_processes_have_the_losses_of_one(tmp_path):
    folder = tmp_path / "run"
    expected = run(
        opened("pi05", "full", train=PART),
        tmp_path / "whole",
        3,
        batch=4,
    )
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    launched = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    words = [str(RUNS), str(folder), "3", "2", PART]
    ranks = []
    for rank in ("0", "1"):  # as torchrun starts them
        variables = {**os.environ, **launched, "ACCELERATE_USE_CPU": "true", "RANK": rank, "LOCAL_RANK": rank}
        ranks.append(forks.Fork(forks.script, words, tmp_path / rank, environment=variables))
    assert [process.wait(240) for process in ranks] == [0, 0], [(tmp_path / rank).read_text() for rank in "01"]
    np.testing.assert_allclose(json.loads((folder / "losses.json").read_text()), expected.losses, rtol=1e-5)
