"""Records a node's inputs, actions, commands and events as rosbag2 bags, in a process of its own."""
