"""Development tools that a robot does not need: fault injection, and training of the demo's checkpoint."""
