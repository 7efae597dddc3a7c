"""The named features of a policy, and the robot's topics and joints that they are bound to."""
