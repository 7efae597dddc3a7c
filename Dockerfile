# vla_ros on ROS 2 Jazzy. Build: docker build -t vla_ros .
# Run (GPU, shared memory large enough for camera frames, the host's network for discovery):
#   docker run --rm -it --gpus all --net host --ipc host -v /models:/models:ro vla_ros \
#     ros2 launch vla_ros policy.launch.py config:=/models/robot.yaml checkpoint:=/models/openvla-7b
FROM ros:jazzy-ros-base

RUN apt-get update && apt-get install -y --no-install-recommends \
      libegl1 libgl1-mesa-dri python3-venv \
      ros-jazzy-iceoryx-posh ros-jazzy-launch-testing ros-jazzy-rmw-cyclonedds-cpp ros-jazzy-rmw-zenoh-cpp \
      ros-jazzy-ros2bag ros-jazzy-rosbag2-storage-mcap \
    && rm -rf /var/lib/apt/lists/*

# ROS's own Python modules stay visible; torch and the rest live beside them. Jazzy's modules are compiled against
# NumPy 1.26.
ENV VIRTUAL_ENV=/opt/vla
RUN python3 -m venv --system-site-packages /opt/vla
WORKDIR /workspace
COPY . src/vla_ros
RUN /opt/vla/bin/python -m pip install --no-cache-dir -c src/vla_ros/constraints-numpy1.txt './src/vla_ros[openvla,sim,replay]' \
    && /opt/vla/bin/python -m pip uninstall --yes vla_ros
RUN . /opt/ros/jazzy/setup.sh && colcon build --packages-select vla_ros

RUN printf '#!/bin/bash\nset -e\nsource /opt/ros/jazzy/setup.bash\nsource /workspace/install/setup.bash\nexec "$@"\n' \
      > /entrypoint.sh && chmod +x /entrypoint.sh
ENTRYPOINT ["/entrypoint.sh"]
CMD ["ros2", "launch", "vla_ros", "demo.launch.py"]
