"""The ROS 2 graph behind one small Node interface: rclpy, or the embedded DDS participant."""
