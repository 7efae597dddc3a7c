"""Small checkpoints in the published layouts, written for tests, benchmarks and training."""
