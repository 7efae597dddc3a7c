import argparse
import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tools.train import cli
from tools.train.batches import Frames
from tools.train.card import command
from tools.train.controls import chosen
from tools.train.evaluate import ROWS, evaluate
from tools.train.export import FACTS, export
from tools.train.fit import Run
from tools.train.labels import KINDS
from tools.train.recipe import (
    DATASET,
    FOREIGN_DATASET,
    DataRecipe,
    FitOptions,
    FitRecipe,
    LabelRecipe,
    NetworkRecipe,
)
from vla_ros.config import load
from vla_ros.errors import CheckpointError, ConfigError, VlaRosError
from vla_ros.types import Observation
from vla_ros_lab.sim.tasks import make_task
from vla_ros_lab.training import state
from vla_ros_models.openvla.policy import OpenVLAPolicy


@pytest.fixture(scope="module")
def trained(
    tmp_path_factory: pytest.TempPathFactory, demonstrations: Path, small: NetworkRecipe, fit: FitRecipe
) -> tuple[Run, Frames]:
    folder = tmp_path_factory.mktemp("run")
    run = Run(folder, demonstrations, small, LabelRecipe(), fit, FitOptions(device="cpu"))
    frames = run.load()
    run.train(frames)
    return run, frames


@pytest.fixture(scope="module")
def checkpoint(trained: tuple[Run, Frames], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    export(trained[0].folder, folder, "float32")
    return folder


def policy_of(folder: Path, key: str = DATASET) -> OpenVLAPolicy:
    config = load((), [f"policy.checkpoint:={folder}", f"policy.unnorm_key:={key}", "policy.device:=cpu"])
    policy = OpenVLAPolicy(config)
    policy.load()
    return policy


def test_the_policy_infers_the_tokens_of_the_trainer(trained: tuple[Run, Frames], checkpoint: Path) -> None:
    """Greedy decoding of the loaded checkpoint equals the trainer's argmax on the same inputs."""
    run, frames = trained
    policy = policy_of(checkpoint)
    run.trainee.eval()
    batch = frames.draw(1, 0, frames=3, prompts=2, held_out=True)
    texts = [make_task(task, kind).instruction for task in ("pick", "push_left") for kind in KINDS]
    instructions = {tuple(policy.loaded.prompt.encode(text).tolist()): text for text in texts}
    for row in range(6):
        length = int(batch.lengths[row])
        image = batch.images[row // 2]
        text = instructions[tuple(batch.prompts[row, :length].tolist())]
        answer = policy.infer(policy.start_session(), Observation({"image": image.numpy()}, text, 0))
        tokens = torch.from_numpy(answer.tokens)[None]
        with torch.inference_mode():
            logits = run.trainee(
                image[None], batch.prompts[row : row + 1], batch.lengths[row : row + 1], tokens
            ).actions
        assert logits.argmax(-1).tolist() == tokens.tolist()
    policy.close()


def test_a_wrong_key_changes_the_actions_but_not_the_tokens(checkpoint: Path) -> None:
    image = np.random.default_rng(0).integers(0, 256, (224, 224, 3), dtype=np.uint8)
    observation = Observation({"image": image}, "pick up the red cube", 0)
    right, wrong = (
        policy.infer(policy.start_session(), observation)
        for policy in (policy_of(checkpoint, key) for key in (DATASET, FOREIGN_DATASET))
    )
    np.testing.assert_array_equal(right.tokens, wrong.tokens)
    np.testing.assert_array_equal(right.normalized, wrong.normalized)
    np.testing.assert_allclose(wrong.actions[0, 6], right.actions[0, 6])
    assert np.abs(wrong.actions[0, :6] - right.actions[0, :6]).max() > 0.01


def test_half_precision_is_half_the_size_and_loads(trained: tuple[Run, Frames], tmp_path) -> None:
    export(trained[0].folder, tmp_path, "float16", shards=3)
    files = list(tmp_path.glob("*.safetensors"))
    assert len(files) == 3
    facts = json.loads((tmp_path / FACTS).read_text())
    assert sum(file.stat().st_size for file in files) < 2.2 * facts["parameters"]
    assert policy_of(tmp_path).loaded.model.dtype == torch.float32


def test_weights_out_of_range_of_the_type_are_refused(trained: tuple[Run, Frames], tmp_path) -> None:
    run = trained[0]
    for name in ("recipe.json", "statistics.json"):
        (tmp_path / name).write_bytes((run.folder / name).read_bytes())
    with torch.no_grad():
        run.trainee.model.projector.fc1.bias[0] = 1e9
    parameters = dict(run.trainee.named_parameters())
    state.save(tmp_path, 4, parameters, torch.optim.AdamW(parameters.values()), [])
    with torch.no_grad():
        run.trainee.model.projector.fc1.bias[0] = 0.0
    with pytest.raises(CheckpointError, match=r"projector\.fc1\.bias.*bfloat16"):
        export(tmp_path, tmp_path / "out", "float16")
    with pytest.raises(ConfigError, match="int8"):
        export(tmp_path, tmp_path / "out", "int8")


def test_the_card_states_the_facts_and_the_commands(
    trained: tuple[Run, Frames], checkpoint: Path, fit: FitRecipe, small: NetworkRecipe, tmp_path: Path
) -> None:
    card = (checkpoint / "README.md").read_text()
    for text in ("seeds 10000000 to 10000002", f"| steps | {fit.steps},", "Not evaluated yet", "0.7"):
        assert text in card
    for option in (f"--vision-width {small.vision_width}", f"--steps {fit.steps}", "--tasks pick push_left"):
        assert option in card
    assert "--prompts" not in card  # at its default
    assert "push the ... to the left" in card
    row = {
        "name": "plain",
        "title": "unchanged",
        "options": [],
        "episodes": 4,
        "first_seed": 0,
        "success_rate": 0.75,
        "wrong_object_rate": 0.25,
        "steps": 17.5,
        "expected": [0.97, 1.0],
        "met": False,
    }
    rows = tmp_path / "evaluation.json"
    rows.write_text(json.dumps([row]))
    export(trained[0].folder, tmp_path, "float32", evaluation=rows)
    card = (tmp_path / "README.md").read_text()
    assert "| unchanged |  | 4 | 75.0% | 25.0% | 17.5 | >= 97% MISSED |" in card
    assert "Not evaluated yet" not in card


def test_the_commands_of_the_card_parse(checkpoint: Path, fit: FitRecipe, small: NetworkRecipe) -> None:
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    lines = command(json.loads((checkpoint / FACTS).read_text())).splitlines()
    parsed = [parser.parse_args(line.split()[3:]) for line in lines]
    assert [each.stage for each in parsed] == ["data", "fit", "export", "evaluate"]
    assert cli.recipe_of(FitRecipe, parsed[1]) == fit
    assert cli.recipe_of(NetworkRecipe, parsed[1]) == small
    assert dataclasses.asdict(cli.recipe_of(DataRecipe, parsed[0]))["tasks"] == ("pick", "push_left")


def test_an_evaluation_is_not_repeated(trained: tuple[Run, Frames], tmp_path: Path) -> None:
    """With two parallel simulations, as in a full evaluation, and with one."""
    folder, scores = tmp_path / "checkpoint", tmp_path / "scores"
    export(trained[0].folder, folder, "float32")
    short = tuple(
        dataclasses.replace(one, options=(*one.options, "--max-steps", "3"))
        for one in (*chosen("blank"), *chosen("plain"))
    )
    evaluate(folder, short[:1], range(2), scores, 2, "cpu")
    log = (scores / "blank.episodes.jsonl").read_text()
    rows = evaluate(folder, short, range(2), scores, 1, "cpu")
    assert (scores / "blank.episodes.jsonl").read_text() == log
    assert [(row["name"], row["episodes"], row["success_rate"]) for row in rows] == [
        ("blank", 2, 0.0), ("plain", 2, 0.0)
    ]  # fmt: skip
    assert json.loads((scores / ROWS).read_text()) == rows
    with pytest.raises(VlaRosError, match="run it again"):
        evaluate(tmp_path / "none", short[:1], range(2), tmp_path / "other", 1, "cpu")
