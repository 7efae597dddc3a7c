"""The named features of a policy, and their binding to the robot's topics and joints."""
