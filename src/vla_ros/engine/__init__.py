"""Execution of a vision-language-action model at the speed of the hardware, with the tokens of plain decoding.

``weights`` fuses and quantises (``int8`` and ``int4`` in the order of ``lowbit``), ``decoder`` runs them over
fixed buffers through ``ops`` (torch) or ``triton_ops`` (own kernels in ``kernels``, cut by ``launches``, compared
by ``agreement``), ``drafts`` saves passes, ``program`` and ``programs`` are the stages and the graphs of each
prompt length, ``runner`` is the device, ``executor`` puts them together. ``frames`` and ``preprocess`` make
pictures of camera frames. Importing the package itself loads no torch.
"""
