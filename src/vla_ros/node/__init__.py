"""The policy as a ROS 2 node: wiring, life cycle, the control loop."""
