"""SnapFlow's loss, gradients and steps as published code computed them, and distilled checkpoints."""

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torch", reason="the library torch is not installed (extra 'openvla')")
pytest.importorskip("peft", reason="the library peft is not installed (extra 'train')")

import torch

from test.policies.pi.conftest import write_layout
from test.training.test_golden import Golden, check_steps, compare, flow_parameters, lerobot_batch, trainable
from vla_ros_lab.training.adapting import AdapterOptions, adapt
from vla_ros_lab.training.recipes import recipe_of
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
