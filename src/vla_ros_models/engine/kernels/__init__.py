"""Triton kernels. Imported only if Triton is installed."""
