# Sourced by colcon's setup files: lib/vla_ros, where ROS keeps a package's programs, has `vla-ros`.
_colcon_prepend_unique_value PATH "$COLCON_CURRENT_PREFIX/lib/vla_ros"
