"""Triton kernels of the decoder. Imported only where Triton is installed."""
