import contextlib
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tools.train.batches import Frames, augment, kind_map
from tools.train.fit import Run
from tools.train.labels import KINDS
from tools.train.loop import LOG
from tools.train.objective import losses, step_losses
from tools.train.recipe import FitOptions, FitRecipe, LabelRecipe, NetworkRecipe
from vla_ros.errors import CheckpointError, ConfigError
from vla_ros_lab.sim.tasks import SLOTS
from vla_ros_lab.training.recipes import warm_cosine
from vla_ros_models.engine.decoder import verify

CPU = FitOptions(device="cpu")


MakeRun = Callable[..., tuple[Run, Frames]]


@pytest.fixture(scope="module")
def make_run(demonstrations: Path, small: NetworkRecipe, fit: FitRecipe) -> MakeRun:
    def make(folder: Path, recipe: FitRecipe = fit, options: FitOptions = CPU) -> tuple[Run, Frames]:
        run = Run(folder, demonstrations, small, LabelRecipe(), recipe, options)
        return run, run.load()

    return make


@pytest.fixture(scope="module")
def untrained(make_run: MakeRun, tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Frames]:
    return make_run(tmp_path_factory.mktemp("untrained"))


def test_training_logits_are_the_policys(untrained: tuple[Run, Frames]) -> None:
    """Teacher-forced logits of a batch equal those of prefill and decoding, also where a prompt is padded."""
    run, frames = untrained
    run.trainee.eval()
    batch = frames.draw(3, 0, frames=4, prompts=3, held_out=True)
    assert len(set(batch.lengths.tolist())) == 2  # picks and pushes: some are padded
    model = run.trainee.model
    with torch.inference_mode():
        trained = run.trainee(batch.images, batch.prompts, batch.lengths, batch.tokens).actions
        for row in range(len(batch.lengths)):
            length = int(batch.lengths[row])
            image = batch.images[row // 3][None]
            patches = model.embed_image(model.normalize(image))
            logits, prefix = model.prefill(patches, batch.prompts[row : row + 1, :length], room=7)
            for position in range(7):
                torch.testing.assert_close(trained[row, position], logits[0], atol=2e-5, rtol=1e-4)
                if position < 6:
                    token = batch.tokens[row : row + 1, position]
                    end = prefix.end + position
                    logits = verify(prefix.weights, model.ops, prefix.cache, token[:, None], end)[:, 0]


def test_a_batch_has_the_followed_instruction_first(untrained: tuple[Run, Frames]) -> None:
    frames = untrained[1]
    batch = frames.draw(0, 1, frames=16, prompts=3)
    prompts = [tuple(prompt.tolist()) for prompt in batch.prompts]
    index = {tuple(prompt.tolist()): number for number, prompt in enumerate(frames.prompts)}
    for frame in range(16):
        asked = [index[prompts[frame * 3 + prompt]] for prompt in range(3)]
        assert len(set(asked)) == 3
        shown = set(batch.kinds[frame].tolist()) - {len(KINDS)}
        for row, prompt in enumerate(asked):
            assert prompt % len(KINDS) in shown
            place = int(batch.places[frame * 3 + row])
            assert int(batch.kinds[frame, place]) == prompt % len(KINDS)
    again = frames.draw(0, 1, frames=16, prompts=3)
    for field in dataclasses.fields(batch):
        torch.testing.assert_close(getattr(batch, field.name), getattr(again, field.name), rtol=0, atol=0)
    other = frames.draw(1, 1, frames=16, prompts=3)
    assert not torch.equal(batch.images, other.images)


def test_the_tokens_of_a_batch_are_those_of_the_named_object(untrained: tuple[Run, Frames]) -> None:
    frames = untrained[1]
    row = int(frames.training[5])
    one = dataclasses.replace(frames, training=frames.training[5:6])
    batch = one.draw(0, 0, frames=1, prompts=3)
    for prompt, tokens in zip(batch.prompts, batch.tokens, strict=True):
        number = next(i for i, ids in enumerate(frames.prompts) if torch.equal(ids, prompt))
        slot = frames.kinds[row].tolist().index(number % len(KINDS))
        torch.testing.assert_close(tokens, frames.tokens[row, number // len(KINDS) * SLOTS + slot].long())


def test_a_resumed_run_ends_with_the_weights_of_an_uninterrupted_one(tmp_path, make_run: MakeRun) -> None:
    """Killed after every step: what is on disk is all that a new process has."""
    whole, frames = make_run(tmp_path / "whole")
    expected_losses = whole.train(frames).losses
    assert whole.done
    for steps in range(whole.recipe.steps):
        part, frames = make_run(tmp_path / "parts", options=FitOptions(device="cpu", save_every=1))
        assert part.step == steps
        draw = part.draw

        def killed(frames, step, *, held_out=False, draw=draw, last=2 * (steps + 1)):
            if step == last and not held_out:
                raise SystemExit
            return draw(frames, step, held_out=held_out)

        part.draw = killed
        with contextlib.suppress(SystemExit):
            losses = part.train(frames).losses
    assert losses == expected_losses
    for (name, expected), (_, found) in zip(
        whole.trainee.named_parameters(), part.trainee.named_parameters(), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=0, atol=0, msg=name)


def test_a_few_steps_on_a_few_frames_lower_every_loss(tmp_path, make_run: MakeRun) -> None:
    recipe = FitRecipe(steps=20, batch=4, warmup=3, learning_rate=5e-3)
    run, frames = make_run(tmp_path, recipe)
    few = dataclasses.replace(frames, training=frames.training[:4])
    probe = few.draw(0, 9, frames=4, prompts=2)

    def measure() -> list[float]:
        with torch.no_grad():
            answer = run.trainee(probe.images, probe.prompts, probe.lengths, probe.tokens)
            return [float(value) for value in losses(answer, probe, recipe)]

    before = measure()
    run.train(few)
    after = measure()
    for name, old, new in zip(("total", "actions", "places", "kinds"), before, after, strict=False):
        assert new < 0.8 * old, f"{name}: {old} to {new}"
    lines = [json.loads(line) for line in (tmp_path / LOG).read_text().splitlines()]
    assert {"step", "token_accuracy", "place_accuracy", "seconds"} <= set(lines[0])


def test_bf16_autocast_runs_through_the_models_own_modules(untrained: tuple[Run, Frames], fit: FitRecipe) -> None:
    run, frames = untrained
    batch = frames.draw(0, 0, frames=2, prompts=2)
    with torch.autocast("cpu", torch.bfloat16):
        found = losses(run.trainee(batch.images, batch.prompts, batch.lengths, batch.tokens), batch, fit)
    found.total.backward()
    assert torch.isfinite(found.total)
    assert all(parameter.grad is not None for parameter in run.trainee.parameters())
    run.trainee.zero_grad()
    plain = losses(run.trainee(batch.images, batch.prompts, batch.lengths, batch.tokens), batch, fit)
    assert abs(float(found.total.detach()) - float(plain.total.detach())) < 0.05


def test_invisible_objects_are_not_in_the_kind_map() -> None:
    kinds = torch.tensor([[3, 5, -1, -1]])
    patches = torch.tensor([[7, -1, -1, -1]])
    board = kind_map(kinds, patches, 256)
    assert board[0, 7] == 3
    assert (board != len(KINDS)).sum() == 1


def test_augmentation_changes_colours_only() -> None:
    images = torch.zeros(64, 28, 28, 3, dtype=torch.uint8)
    images[:, 5, 9] = 200
    changed = augment(images, torch.Generator().manual_seed(0))
    assert changed.shape == images.shape
    assert float(changed.min()) >= 0
    assert float(changed.max()) <= 255
    brightest = changed.sum(-1).flatten(1).argmax(1)
    assert (brightest == 5 * 28 + 9).all()
    assert np.unique(changed[:, 5, 9, 0].round().numpy()).size > 30
    assert any(torch.equal(new, old.float()) for new, old in zip(changed, images, strict=True))


def test_the_rate_warms_up_and_falls() -> None:
    rates = [warm_cosine(step, 100, 10, 0.02) for step in range(101)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == pytest.approx(1.0)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[100] == pytest.approx(0.02)


def test_another_recipe_or_a_damaged_state_is_refused(tmp_path, make_run: MakeRun, fit: FitRecipe) -> None:
    run, frames = make_run(tmp_path)
    run.train(frames)
    with pytest.raises(ConfigError, match="fit"):
        make_run(tmp_path, dataclasses.replace(fit, steps=9))
    (tmp_path / f"step-{fit.steps:08d}" / "state.safetensors").write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match="is not a state"):
        make_run(tmp_path)


def test_the_step_is_one_graph_for_the_compiler(untrained: tuple[Run, Frames], fit: FitRecipe) -> None:
    """A graph break would cost most of the gain on a GPU; the tracer finds it on any machine."""
    run, frames = untrained
    batch = frames.draw(0, 0, frames=2, prompts=2)
    compiled_losses = torch.compile(step_losses, fullgraph=True, backend="eager")
    compiled, plain = compiled_losses(run.trainee, batch, fit), step_losses(run.trainee, batch, fit)
    compiled.total.backward()
    torch.testing.assert_close(compiled.total, plain.total)
