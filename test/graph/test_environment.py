import xml.etree.ElementTree as ElementTree

import pytest

pytest.importorskip("rosbags", reason="the library rosbags is not installed (extra 'dds')")

from vla_ros.errors import ConfigError
from vla_ros.graph.environment import dds_environment


def tree(**variables):
    return ElementTree.fromstring(dds_environment(variables).configuration().split(">,")[0])


def test_defaults_stay_on_this_host():
    environment = dds_environment({})
    assert (environment.domain_id, environment.range, environment.gid_size) == (0, "LOCALHOST", 16)
    assert "LOCALHOST (default)" in environment.describe()
    assert "ROS_AUTOMATIC_DISCOVERY_RANGE=SUBNET" in environment.describe()
    assert "ROS_LOCALHOST_ONLY=1 on both sides" in dds_environment({"ROS_DISTRO": "humble"}).describe()
    configuration = tree()
    assert configuration.findtext("Domain/General/AllowMulticast") == "false"
    assert [peer.get("address") for peer in configuration.iter("Peer")] == ["localhost"]


def test_subnet_uses_multicast_and_small_packets():
    configuration = tree(ROS_AUTOMATIC_DISCOVERY_RANGE="SUBNET", ROS_STATIC_PEERS="10.0.0.7;robot.local")
    assert configuration.find("Domain/General/AllowMulticast") is None
    assert configuration.find("Domain/General/MaxMessageSize") is None
    assert [peer.get("address") for peer in configuration.iter("Peer")] == ["10.0.0.7", "robot.local"]


@pytest.mark.parametrize(
    "variables", [{}, {"ROS_AUTOMATIC_DISCOVERY_RANGE": "SUBNET", "ROS_STATIC_PEERS": "10.0.0.7"}]
)
def test_a_peer_may_start_at_any_time(variables):
    """By default, Cyclone DDS forgets after 30 s the ports of peers that were silent."""
    assert tree(**variables).findtext("Domain/Discovery/InitialLocatorPruneDelay") == "inf"


def test_off_hides_behind_a_tag_and_system_default_leaves_discovery_alone():
    assert (
        tree(ROS_AUTOMATIC_DISCOVERY_RANGE="OFF").findtext("Domain/Discovery/Tag").startswith("ros_discovery_off_")
    )
    assert list(tree(ROS_AUTOMATIC_DISCOVERY_RANGE="system_default").find("Domain/Discovery")) == []


@pytest.mark.parametrize(("only", "reach"), [("1", "LOCALHOST"), ("0", "SUBNET")])
def test_localhost_only_decides_where_it_is_set(only, reach):
    environment = dds_environment({"ROS_LOCALHOST_ONLY": only, "ROS_AUTOMATIC_DISCOVERY_RANGE": "OFF"})
    assert (environment.range, environment.range_source) == (reach, "ROS_LOCALHOST_ONLY")


def test_users_configuration_comes_last_and_wins():
    environment = dds_environment({"CYCLONEDDS_URI": "file:///etc/cyclone.xml"})
    assert environment.configuration().endswith(",file:///etc/cyclone.xml")
    assert "CYCLONEDDS_URI" in environment.describe()


def test_gid_size_follows_the_distribution():
    assert dds_environment({"ROS_DISTRO": "humble"}).gid_size == 24
    assert dds_environment({"ROS_DISTRO": "lyrical"}).gid_size == 16


@pytest.mark.parametrize(
    "variables",
    [
        {"ROS_DOMAIN_ID": "233"},
        {"ROS_DOMAIN_ID": "-1"},
        {"ROS_DOMAIN_ID": "one"},
        {"ROS_LOCALHOST_ONLY": "yes"},
        {"ROS_AUTOMATIC_DISCOVERY_RANGE": "PLANET"},
    ],
)
def test_impossible_values_are_refused_by_name(variables):
    (name,) = variables
    with pytest.raises(ConfigError, match=name):
        dds_environment(variables)
