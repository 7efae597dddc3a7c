"""Times the shipped model families with published sizes against plain PyTorch, from camera messages to actions."""
