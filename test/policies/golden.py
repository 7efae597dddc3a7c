"""What the tests of pi, SmolVLA and GR00T share: cases that published code answered, and changes to files."""

import json
from dataclasses import dataclass

import numpy as np

from vla_ros.errors import VlaRosError


@dataclass(frozen=True, eq=False)
class GoldenCase:
    """One observation and what the published code made of it."""

    values: dict

    def __getitem__(self, name):
        return self.values[name]


def read_cases(path):
    """The arrays of each case in a file, by their names without the case's number."""
    with np.load(path) as file:
        arrays = {key: file[key] for key in file}
    numbers = sorted({key[:2] for key in arrays})
    return [{key[3:]: value for key, value in arrays.items() if key[:2] == number} for number in numbers]


def answer(model, *requests):
    """The engine's chunks [H, A], each as the network returns it."""
    answers = model.engine.answer(requests)
    for one in answers:
        if isinstance(one, VlaRosError):
            raise one
    return [one.actions for one in answers]


def edit_json(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
