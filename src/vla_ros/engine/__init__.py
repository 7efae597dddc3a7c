"""Execution on CUDA: stream, pinned staging, graphs, decoder, quantisation, drafts."""
