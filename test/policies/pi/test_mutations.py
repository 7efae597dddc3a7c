"""What a LeRobot folder says is obeyed as by LeRobot 0.6.1 (``data/pi/mutations.json``), or refused by name.

Where LeRobot is installed, its own answers are compared, too (``.ci/lerobot``).
"""

import importlib.util
import json
import os

import numpy as np
import pytest

from vla_ros.errors import CheckpointError
from vla_ros_models.pi.checkpoint import read_checkpoint
from vla_ros_models.pi.inference import load_model

from .conftest import CASES, DATA, infer
from .mutations import CASES as MUTATIONS
from .mutations import RECORDED, mutate

FILE = DATA / "mutations.json"
ANSWERS = json.loads(FILE.read_text())
RECORD = "RECORD_LEROBOT" in os.environ  # writes LeRobot's answers instead of comparing with them
HAS_LEROBOT = importlib.util.find_spec("lerobot") is not None
parametrize = pytest.mark.parametrize(("kind", "name", "mutation"), MUTATIONS)


@parametrize
def test_a_change_is_obeyed_or_refused(checkpoint, kind, name, mutation):
    folder = checkpoint(kind, "lerobot")
    mutate(folder, mutation)
    if mutation.refused:
        with pytest.raises(CheckpointError, match=mutation.refused):
            load_model(read_checkpoint(folder))
        return
    case, found = CASES[f"{kind}_lerobot"][RECORDED[kind]], read_checkpoint(folder)
    chunk = infer(load_model(found), case.images, case["state"], case.text("prompt"), case["noise"])
    np.testing.assert_allclose(chunk.actions, ANSWERS[kind][name], atol=2e-5, rtol=0)
    assert found.execute_steps == (4 if name == "n_action_steps" else 10)


@pytest.mark.parametrize("kind", ANSWERS)
def test_the_changes_matter(kind):
    """Every kind of change moves LeRobot's own actions, or the comparison would show nothing."""
    usual = np.array(ANSWERS[kind][""])
    moved = {
        name for name, other in ANSWERS[kind].items() if np.shape(other) and np.abs(usual - other).max() > 1e-3
    }
    assert {"min_period", "max_period", "max_length", "state unlisted", "repeated step"} < moved
    assert {"actions MIN_MAX", "state IDENTITY", "num_inference_steps", "swapped cameras"} < moved


@pytest.mark.skipif(not HAS_LEROBOT, reason="needs an environment with LeRobot")
@parametrize
def test_lerobot_answers_as_recorded(checkpoint, kind, name, mutation):
    from .real_lerobot import answer, older

    folder, recorded = checkpoint(kind, "lerobot"), ANSWERS[kind].get(name)
    older(folder)
    mutate(folder, mutation)
    try:
        found = answer(folder, CASES[f"{kind}_lerobot"][RECORDED[kind]])
    except Exception as error:  # whatever LeRobot raises
        found = f"{type(error).__name__}: {error}".splitlines()[0].replace(str(folder), "FOLDER")[:160]
    if RECORD:
        ANSWERS[kind][name] = found if isinstance(found, str) else np.round(found.astype(float), 6).tolist()
        text = json.dumps(ANSWERS, sort_keys=True)
        FILE.write_text(text.replace(']], "', ']],\n"').replace('", "', '",\n"') + "\n")
    elif isinstance(recorded, str):
        # LeRobot's main branch knows this option, for its memory; the family `pi` refuses it.
        assert isinstance(found, str) or name == "no state in the prompt"
    else:
        np.testing.assert_allclose(found, recorded, atol=2e-5, rtol=0)
