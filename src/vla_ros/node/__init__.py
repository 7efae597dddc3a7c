"""The policy as a ROS 2 node: wiring, lifecycle, the control loop."""
