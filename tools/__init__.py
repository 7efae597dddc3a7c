"""What is not needed on a robot: fault injection and the training of the demo's checkpoint."""
