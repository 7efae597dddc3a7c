"""pi0 and pi0.5: openpi's and LeRobot's published checkpoints, without remote code.

``architecture`` has the sizes; ``vision_tower``, ``gemma`` and ``network`` are the network, ``flow`` and ``rtc``
make a chunk with it; ``tokenizer``, ``prompt``, ``normalization`` and ``robots`` are its two ends, put together in
``processing``; ``checkpoint``, ``lerobot``, ``names``, ``loading`` and ``memory`` read a folder; ``inference`` is
what a policy calls.
"""
