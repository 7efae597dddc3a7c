"""A foreign process on the wire: the cyclonedds library alone, with its own type descriptions, no vla_ros.

``python plain_cyclone.py DOMAIN watch TOPIC`` subscribes to a JointState topic and prints each sample's CDR as
hexadecimal digits. ``... spoil TOPIC`` sends malformed std_msgs/String messages. ``... call SERVICE`` calls a
std_srvs/SetBool service twice and prints the responses; ``... call SERVICE early`` calls before it has a reader.
"""

# No "from __future__ import annotations": cyclonedds reads the annotations of its structures.

import json
import os
import sys
import time
from dataclasses import dataclass

from cyclonedds._clayer import ddspy_take
from cyclonedds.core import InstanceState, Policy, Qos, SampleState, ViewState
from cyclonedds.domain import Domain, DomainParticipant
from cyclonedds.idl import IdlStruct
from cyclonedds.idl.types import float64, int32, int64, sequence, uint32, uint64
from cyclonedds.pub import DataWriter
from cyclonedds.sub import DataReader
from cyclonedds.topic import Topic

LOOPBACK = "<Interfaces><NetworkInterface address='127.0.0.1'/></Interfaces>"
CONFIGURATION = (
    f"<CycloneDDS><Domain><General>{LOOPBACK if os.environ.get('ROS_LOCALHOST_ONLY') == '1' else ''}"
    "<AllowMulticast>false</AllowMulticast></General><Discovery>"
    "<ParticipantIndex>auto</ParticipantIndex><Peers><Peer address='localhost'/></Peers>"
    "</Discovery><Compatibility><IgnoreTypeInformation>1.16</IgnoreTypeInformation></Compatibility>"
    "</Domain></CycloneDDS>"
)


@dataclass
class Time(IdlStruct, typename="builtin_interfaces::msg::dds_::Time_"):
    sec: int32
    nanosec: uint32


@dataclass
class Header(IdlStruct, typename="std_msgs::msg::dds_::Header_"):
    stamp: Time
    frame_id: str


@dataclass
class JointState(IdlStruct, typename="sensor_msgs::msg::dds_::JointState_"):
    header: Header
    name: sequence[str]
    position: sequence[float64]
    velocity: sequence[float64]
    effort: sequence[float64]


@dataclass
class Spoiled(IdlStruct, typename="std_msgs::msg::dds_::String_"):
    """Claims to be std_msgs/msg/String: a length, and not what it promises."""

    length: uint32
    rest: uint32


@dataclass
class SetBoolRequest(IdlStruct, typename="std_srvs::srv::dds_::SetBool_Request_"):
    """std_srvs/srv/SetBool's request as rmw_cyclonedds writes it, behind its header."""

    client_guid: uint64
    sequence_number: int64
    data: bool


@dataclass
class SetBoolResponse(IdlStruct, typename="std_srvs::srv::dds_::SetBool_Response_"):
    """std_srvs/srv/SetBool's response as rmw_cyclonedds writes it, behind its header."""

    client_guid: uint64
    sequence_number: int64
    success: bool
    message: str


RELIABLE = Qos(
    Policy.Reliability.Reliable(0),
    Policy.History.KeepLast(10),
    Policy.DataRepresentation(use_cdrv0_representation=True),
)


def say(value: object) -> None:
    print(json.dumps(value), flush=True)


def watch(participant: DomainParticipant, topic: str) -> None:
    reader = DataReader(participant, Topic(participant, "rt" + topic, JointState), RELIABLE)
    say("ready")
    end = time.monotonic() + 60
    while time.monotonic() < end:
        for data, info in ddspy_take(reader._ref, SampleState.Any | ViewState.Any | InstanceState.Any, 10):
            if info.valid_data:
                say({"cdr": bytes(data).hex(), "position": list(JointState.deserialize(data).position)})
        time.sleep(0.01)


def spoil(participant: DomainParticipant, topic: str) -> None:
    writer = DataWriter(participant, Topic(participant, "rt" + topic, Spoiled), RELIABLE)
    end = time.monotonic() + 20
    while not writer.get_matched_subscriptions() and time.monotonic() < end:
        time.sleep(0.02)
    for _ in range(3):
        writer.write(Spoiled(4000, int.from_bytes(b"abc\0", "little")))
    say("sent" if writer.get_matched_subscriptions() else "never matched")
    sys.stdin.read()


def call(participant: DomainParticipant, service: str, when: str = "") -> None:
    writer = DataWriter(participant, Topic(participant, f"rq{service}Request", SetBoolRequest), RELIABLE)
    replies = Topic(participant, f"rr{service}Reply", SetBoolResponse)
    reader = None if when == "early" else DataReader(participant, replies, RELIABLE)
    end = time.monotonic() + 20
    while not (writer.get_matched_subscriptions() and (reader is None or reader.get_matched_publications())):
        if time.monotonic() > end:
            say("never matched")
            return
        time.sleep(0.02)
    for number, data in enumerate((True, False)):
        writer.write(SetBoolRequest(0x1122334455667788, number, data))
    if reader is None:
        time.sleep(0.2)  # long enough for a response to come, and to be lost
        reader = DataReader(participant, replies, RELIABLE)
    while time.monotonic() < end:
        for answer in reader.take(N=10):
            say([answer.client_guid, answer.sequence_number, answer.success, answer.message])
        time.sleep(0.01)


def main() -> None:
    number = int(sys.argv[1])
    domain = Domain(number, ",".join(filter(None, (CONFIGURATION, os.environ.get("CYCLONEDDS_URI")))))
    participant = DomainParticipant(number)
    {"watch": watch, "spoil": spoil, "call": call}[sys.argv[2]](participant, *sys.argv[3:])
    del participant, domain


if __name__ == "__main__":
    import threading

    # The loops above end with their input, whatever they wait for.
    if sys.argv[2] != "spoil":
        threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
    main()
