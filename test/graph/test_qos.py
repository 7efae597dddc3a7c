import pytest

from vla_ros.graph.qos import incompatibilities, profile


def test_unknown_profile_lists_the_known():
    with pytest.raises(ValueError, match=r"'cammera'.*camera"):
        profile("cammera")


@pytest.mark.parametrize(
    ("requested", "offered", "reasons"),
    [
        ("camera", "camera", 0),
        ("camera", "command", 0),
        ("command", "camera", 1),
        ("instruction", "command", 1),
        ("instruction", "camera", 2),
        ("command", "instruction", 0),
    ],
)
def test_request_against_offer(requested, offered, reasons):
    assert len(incompatibilities(profile(requested), profile(offered))) == reasons
