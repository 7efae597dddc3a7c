import numpy as np
import pytest

from vla_ros.contract.components import parse_components
from vla_ros.contract.spec import PolicySpec
from vla_ros.telemetry.debug_image import annotate

GREY = np.full((224, 224, 3), 128, np.uint8)
ORANGE = (255, 140, 30)


def drawn(action: np.ndarray, spec: PolicySpec | None = None, text: str = "pick up the cup") -> np.ndarray:
    return annotate(GREY, text, action, spec or PolicySpec(), 1.0, "armed")


def centre_of(image: np.ndarray, colour: tuple[int, int, int]) -> np.ndarray:
    rows, columns = np.nonzero((image == colour).all(axis=2))
    return np.array([columns.mean(), rows.mean()])


def test_the_image_is_enlarged_and_the_original_is_untouched() -> None:
    before = GREY.copy()
    image = drawn(np.zeros(7))
    assert image.shape == (448, 448, 3)
    assert image.dtype == np.uint8
    assert np.array_equal(GREY, before)
    assert (image[:48] != 128).any(), "no text"


def test_the_arrow_points_where_the_action_goes() -> None:
    forward, backward, left, right = (
        centre_of(drawn(np.array([x, y, 0, 0, 0, 0, 1.0])), ORANGE)
        for x, y in ((0.02, 0), (-0.02, 0), (0, 0.02), (0, -0.02))
    )
    assert forward[1] < backward[1] - 20
    assert left[0] < right[0] - 20
    assert np.isclose(forward[0], backward[0], atol=2)


@pytest.mark.parametrize("action", [np.full(7, np.nan), np.full(7, np.inf), np.full(7, 1e300), np.zeros(14)])
def test_any_action_and_any_text_can_be_drawn(action: np.ndarray) -> None:
    assert drawn(action, text="").shape == (448, 448, 3)
    assert drawn(action, text="größer\n" * 1000).shape == (448, 448, 3)
    joints = PolicySpec(action=parse_components("arm.joint_position", action=True), dimension=len(action))
    assert not (drawn(action, joints) == ORANGE).all(axis=2).any()
