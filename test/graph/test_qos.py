import pytest

from vla_ros.graph.qos import PROFILES, incompatibilities, profile


@pytest.mark.parametrize(
    ("name", "reliability", "durability", "depth"),
    [
        ("camera", "BEST_EFFORT", "VOLATILE", 1),
        ("command", "RELIABLE", "VOLATILE", 1),
        ("instruction", "RELIABLE", "TRANSIENT_LOCAL", 1),
        ("state", "BEST_EFFORT", "VOLATILE", 1),
        ("joint_states", "BEST_EFFORT", "VOLATILE", 10),
        ("state_publisher", "RELIABLE", "VOLATILE", 1),
        ("diagnostics", "RELIABLE", "VOLATILE", 10),
    ],
)
def test_profiles(name, reliability, durability, depth):
    found = profile(name)
    assert (found.reliability.name, found.durability.name, found.depth) == (reliability, durability, depth)


def test_no_profile_keeps_all_samples():
    assert {item.history.name for item in PROFILES.values()} == {"KEEP_LAST"}


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
