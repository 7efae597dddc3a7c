"""What a policy needs and answers, by name, and what of the robot feeds it."""
