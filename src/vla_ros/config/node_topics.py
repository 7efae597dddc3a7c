"""Names of the node's own topics; ``~`` is the node's name. ROS 2's remaps rename them."""

INSTRUCTION = "~/instruction"  # in: std_msgs/String, RELIABLE, TRANSIENT_LOCAL
ACTION = "~/action"  # out: std_msgs/Float64MultiArray, the action before limits and kinematics
PERSON_ACTION = "~/person_action"  # out: std_msgs/Float64MultiArray, a correcting person's action, before limits
LABEL = "~/label"  # in: std_msgs/String that ends the episode: success, failure, discard or end
EVENT = "~/event"  # out: std_msgs/String, JSON at each change of source, episode, label, instruction or reasons
LEADER_TARGET = "~/leader_target"  # out: sensor_msgs/JointState to which a leader with motors goes before its use
RUN_SUCCESS = "~/success"  # in: std_msgs/Bool; true ends a goal of ~/run_policy with success
HEARTBEAT = "~/heartbeat"  # in: std_msgs/Empty; required if timeouts.heartbeat is not 0
# out: std_msgs/UInt32MultiArray of the guard at 20 Hz: counter, state (0 holding, 1 moving, 2 stopped), and the
# CRC-32 of both as little-endian bytes
GUARD_HEARTBEAT = "~/guard_heartbeat"
DIAGNOSTICS = "/diagnostics"  # out: diagnostic_msgs/DiagnosticArray, once a second
STATUS = "~/status"  # out: std_msgs/String with state and reasons as JSON at each change, TRANSIENT_LOCAL
# out: std_msgs/String, JSON of what a person wants to see beside the status: the cameras' topics and type, and each
# arm's joints, measured and last commanded; ten times a second, if subscribed
ROBOT_VIEW = "~/view"
COLLISION = "~/collision"  # out: visualization_msgs/MarkerArray of what collision.check sees, if subscribed
DEBUG_IMAGE = "~/debug_image"  # out: sensor_msgs/Image, the policy's image and action, if subscribed
