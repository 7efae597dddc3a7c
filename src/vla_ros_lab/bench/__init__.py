"""``vla-ros bench``: inference time, compared with plain PyTorch and the hardware's limits."""
