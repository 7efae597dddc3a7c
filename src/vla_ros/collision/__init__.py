"""Where a robot's bodies are, and how far apart they stay along a motion: geometry, pairs, distances."""
