"""SnapFlow's loss, gradients and steps as published code computed them, and distilled checkpoints."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="the library torch is not installed (extra 'openvla')")
pytest.importorskip("peft", reason="the library peft is not installed (extra 'train')")

import torch

from test.policies.pi.conftest import write_layout
from test.training.runs import OPTIONS, ArmSamples, policy_of
from test.training.test_golden import CPU, Golden, check_steps, compare, flow_parameters, lerobot_batch, trainable
from vla_ros.errors import CheckpointError, ConfigError, VlaRosError
from vla_ros.types import PreviousChunk
from vla_ros_lab.training.adapting import AdapterOptions, adapt
from vla_ros_lab.training.export import export
from vla_ros_lab.training.recipes import recipe_of
from vla_ros_lab.training.stream import SampleStream
from vla_ros_models.checkpoint_files import from_files, read_manifest
from vla_ros_models.convert import convert
from vla_ros_models.distillation import TRAINED, ShortcutBatch, distilled


def distilling(folder, steps=1):
    """A checkpoint that is to be distilled, and what trains."""
    found = distilled(trainable(folder), steps)
    adapt(found, recipe_of(found.family, found.layout), AdapterOptions("full", train=TRAINED[found.family]), "cpu")
    return found


@pytest.mark.parametrize("name", ["snapflow_pi05", "snapflow_pi05_twin"])
def test_the_objective_is_the_published_one(tmp_path, name):
    """``x_1`` is the noise of the samples that learn a shortcut; the order of a batch does not matter."""
    found, golden = distilling(write_layout(tmp_path / "pi", "pi05", "lerobot")), Golden(name)
    parameters = flow_parameters(found, "model.")
    for key in [key for key in golden if key.startswith("target_time_mlp")]:
        if "_out." in key:
            assert not parameters[f"model.{key}"].any()
        with torch.no_grad():
            parameters[f"model.{key}"].copy_(golden.tensor(key))
    order = golden.tensor("permutation")
    golden.setdefault("state_normalized", golden["state"])  # pi0.5 has the state in its prompt
    inner = lerobot_batch(golden, found_inputs(found)).each(lambda one: one[order])
    count = len(order) - len(golden["x_1"])
    noise = torch.cat([inner.noise[:count], golden.tensor("x_1")])
    left = torch.cat([inner.time[:count], torch.ones(len(order) - count)])
    batch = ShortcutBatch(inner, count, noise, left, torch.zeros_like(inner.is_pad))
    element = found.trainee(batch).element[..., :7].detach()
    np.testing.assert_allclose(element, golden["loss_element"][order], rtol=1e-4, atol=1e-4)
    trained = {name for name, one in parameters.items() if one.requires_grad}
    assert trained <= set(golden["grad_names"].tolist())
    compare(golden, lambda: found.trainee(batch).total, parameters)
    check_steps(golden, lambda: found.trainee(batch).total, parameters)


def found_inputs(found):
    return replace(found, inputs=found.inputs.inputs)


def perturb(found):
    """Make the flow depend on where a step ends."""
    random = torch.Generator().manual_seed(3)
    for name, one in found.trainee.named_parameters():
        if "target_time_mlp_out" in name:
            one.data.copy_(torch.randn(one.shape, generator=random) * 0.2)


def written(tmp_path, family, steps, changed=True):
    """The options and the folder of a distilled checkpoint, and its trainable as written."""
    folder, options = OPTIONS[family] if family != "pi0" else (write_layout(tmp_path / "pi0", "pi0", "lerobot"), ())
    found = distilled(policy_of(folder, *options).trainable(CPU), steps)
    recipe = recipe_of(found.family, found.layout)
    adapted = adapt(found, recipe, AdapterOptions("full", train=TRAINED[found.family]), "cpu")
    if changed:
        perturb(found)
    export(adapted, Path(folder), tmp_path / "out", flow_steps=steps)
    return options, Path(folder), tmp_path / "out", found


FAMILIES = ("pi0", "pi05", "smolvla", "groot")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("steps", [1, 2])
def test_the_engine_takes_the_steps_that_were_trained(tmp_path, family, steps):
    """Each step from noise on is the network's velocity towards the time at which the step ends."""
    options, _, out, found = written(tmp_path, family, steps)
    samples = ArmSamples(found.spec)
    sample = samples[5]
    policy = policy_of(out, *options)
    policy.load()
    model = policy.loaded.engine.model
    noise = np.random.default_rng(4).standard_normal((model.horizon, model.action_dim)).astype(np.float32)
    seen = replace(sample.observation, noise=noise)
    chunk = policy.infer(policy.start_session(), seen)
    prepared = found.inputs.inputs
    prepared = replace(prepared, state_dropout=0.0) if family == "groot" else prepared
    batch = prepared.collate([prepared.prepare(seen, sample.actions, sample.is_pad, np.random.default_rng(0))])
    trainee, noisy = found.trainee.trainee, torch.from_numpy(noise)[None]
    with torch.no_grad():
        context = trainee.read(batch)
        for step in range(steps):
            left, target = (torch.tensor([1 - (step + more) / steps]) for more in (0, 1))
            noisy = noisy - trainee.predict(batch, context, noisy, left, target) / steps
    shown = policy.loaded.processing.shown_actions(noisy[0].numpy())
    np.testing.assert_allclose(chunk.normalized, shown, atol=2e-4)
    with torch.no_grad():
        other = trainee.predict(batch, context, torch.from_numpy(noise)[None], torch.ones(1), torch.ones(1))
        one = trainee.predict(batch, context, torch.from_numpy(noise)[None], torch.ones(1), torch.zeros(1))
    assert (other - one).abs().max() > 1e-2, "the end of a step changes nothing"
    policy.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_untrained_it_is_its_teacher_and_the_way_back_is_exact(tmp_path, family):
    options, teacher, out, found = written(tmp_path, family, 2, changed=False)
    noise = np.random.default_rng(4).standard_normal(policy_of(teacher, *options).describe().noise)
    seen = replace(ArmSamples(found.spec)[5].observation, noise=noise)
    chunks = []
    for folder, more in ((teacher, ("policy.flow_steps:=2",)), (out, ())):
        policy = policy_of(folder, *options, *more)
        policy.load()
        chunks.append(policy.infer(policy.start_session(), seen).actions)
        policy.close()
    np.testing.assert_array_equal(*chunks)
    with pytest.raises(ConfigError, match="--teacher"):
        convert(out, tmp_path / "other")
    convert(out, tmp_path / "back", teacher=True)
    before, after = (read_manifest(folder) for folder in (teacher, tmp_path / "back"))
    assert before.keys() == after.keys()
    new = dict(from_files(after)(list(after)))
    for name, old in from_files(before)(list(before)):
        assert old.dtype == new[name].dtype
        assert torch.equal(old, new[name]), name
    stated, restored = ((folder / "config.json").read_text() for folder in (teacher, tmp_path / "back"))
    assert json.loads(stated) == json.loads(restored)
    (out / "teacher.safetensors").unlink()
    with pytest.raises(CheckpointError, match="copy the whole folder"):
        convert(out, tmp_path / "lost", teacher=True)


def test_other_options_are_refused_with_the_reason(tmp_path):
    _, teacher, out, _ = written(tmp_path, "pi05", 1)
    for option, reason in (
        ("policy.flow_steps:=10", "was distilled into 1 and knows no other number"),
        ("policy.rtc:=jacobian", "has one flow step"),
        ("policy.rtc_max_guidance:=10.0", "set at most 1"),
    ):
        with pytest.raises(ConfigError, match=reason):
            policy_of(out, option).load()
    policy_of(out, "policy.flow_steps:=1", "policy.rtc_max_guidance:=1.0").load()
    with pytest.raises(ConfigError, match="train its teacher"):
        policy_of(out).trainable(CPU)
    with pytest.raises(ConfigError, match="was not distilled"):
        convert(teacher, tmp_path / "x", teacher=True)
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config["teacher"]))
    with pytest.raises(CheckpointError, match="target_time_mlp"):  # more tensors than the teacher has
        policy_of(out).load()


@pytest.mark.parametrize("mode", ["guided", "trained"])
def test_a_single_step_continues_the_plan(tmp_path, mode):
    """Guided, the chunk is mixed with the plan by the weights; trained, it begins with what is given."""
    _, _, out, found = written(tmp_path, "pi05", 1)
    policy = policy_of(out, f"policy.rtc:={mode}", "policy.rtc_schedule:=linear")
    policy.load()
    horizon, size = policy.spec.horizon, policy.spec.dimension
    noise = np.random.default_rng(4).standard_normal(policy.spec.noise)
    seen = replace(ArmSamples(found.spec)[5].observation, noise=noise)
    free = policy.infer(policy.start_session(), seen)
    plan = free.actions[:10] + 0.05
    kept = replace(seen, previous=PreviousChunk(plan, 3))
    batch = policy.infer_batch([(policy.start_session(), one) for one in (kept, seen)])
    assert not any(isinstance(one, VlaRosError) for one in batch)
    np.testing.assert_allclose(batch[1].actions, free.actions, atol=1e-5)
    share = np.zeros(horizon)
    share[:3], share[3:10] = 1, np.linspace(1, 0, 9)[1:-1]
    if mode == "guided":
        wanted = free.actions + share[:, None] * (np.pad(plan, ((0, horizon - 10), (0, 0))) - free.actions)
        np.testing.assert_allclose(batch[0].actions[:10], wanted[:10], atol=1e-4)
    np.testing.assert_allclose(batch[0].actions[:3], plan[:3], atol=1e-5)
    assert np.isfinite(batch[0].actions).all()
    assert batch[0].actions.shape == (horizon, size)


def test_given_actions_train_as_they_are_inferred(tmp_path):
    """With given actions at time 0, the network's velocity is that of the engine's trained real-time chunking."""
    _, _, out, found = written(tmp_path, "pi05", 1)
    policy = policy_of(out, "policy.rtc:=trained")
    policy.load()
    sample = ArmSamples(found.spec)[5]
    noise = np.random.default_rng(4).standard_normal(policy.spec.noise).astype(np.float32)
    seen = replace(sample.observation, noise=noise)
    plan = policy.infer(policy.start_session(), seen).actions[:10] + 0.02
    chunk = policy.infer(policy.start_session(), replace(seen, previous=PreviousChunk(plan, 4)))
    inputs = found.inputs.inputs
    batch = inputs.collate(
        [inputs.prepare(seen, plan[:1].repeat(16, 0), np.zeros(16, bool), np.random.default_rng(0))]
    )
    state = np.concatenate([sample.observation.state[one.key] for one in policy.spec.state])
    noisy = noise.copy()
    noisy[:4, : plan.shape[1]] = policy.loaded.processing.model_actions(plan[:4], state)
    given = torch.arange(16)[None] < 4
    with torch.no_grad():
        trainee = found.trainee.trainee
        arguments = torch.from_numpy(noisy)[None], torch.ones(1), torch.zeros(1), given
        velocity = trainee.predict(batch, trainee.read(batch), *arguments)[0].numpy()
    shown = policy.loaded.processing.shown_actions(noisy - velocity)
    np.testing.assert_allclose(chunk.normalized[4:], shown[4:], atol=2e-4)


@pytest.mark.parametrize("size", [1, 3, 8])
def test_half_of_the_flows_train_as_before_in_batches_of_any_size(size):
    folder, options = OPTIONS["pi05"]
    found = distilled(policy_of(folder, *options).trainable(CPU), 2, flows=1)
    stream = SampleStream(ArmSamples(found.spec), ArmSamples(found.spec).episodes, found.inputs, seed=0)
    batches = [found.inputs.collate([stream[row * size + one] for one in range(size)]) for row in range(30)]
    assert abs(sum(one.matching for one in batches) / (30 * size) - 0.5) < 0.15
    begins = torch.cat([one.left[one.matching :] for one in batches])
    assert set(begins.tolist()) == {0.5, 1.0}
    assert 0 < sum(one.given.any(dim=1).sum() for one in batches) < 30 * size
