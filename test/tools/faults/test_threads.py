"""Slices of what the commands run for longer: killed threads, and a fuzz of all topics."""

import random

import pytest

from tools.faults.fuzz import TOPICS, fuzz
from tools.faults.threads import VICTIMS, run


@pytest.mark.parametrize("victim", VICTIMS, ids=lambda victim: victim.name)
def test_a_killed_thread_has_the_reaction_and_the_reason_that_the_page_states(victim, tmp_path) -> None:
    seed = random.SystemRandom().randrange(10**5)
    [killed] = run(1, seed, tmp_path, [victim])
    assert killed.place, "nothing was injected"
    assert not killed.wrong, f"seed {seed}"


@pytest.mark.parametrize(
    ("output", "inputs"),
    [("position", "plain"), ("twist", "plain"), ("velocity", "plain"), ("position", "other")],
)
def test_a_stop_is_in_force_in_time_whatever_comes_on_any_topic_and_service(output: str, inputs: str) -> None:
    assert len(TOPICS[inputs]) >= 10
    seed = random.SystemRandom().randrange(10**5)
    outcome = fuzz(100, seed, output, 1.0, inputs=inputs)  # on a busy machine
    assert outcome.stops == 5
    assert not outcome.wrong, f"seed {seed}"
