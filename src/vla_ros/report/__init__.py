"""Self-contained HTML reports: one file, no network, light and dark, readable on a phone.

``markup`` escapes, ``page`` lays out, ``charts`` draws SVG, ``pictures`` embeds images; ``demo`` is the report of
``vla-ros demo``. The report of ``vla-ros replay`` lives in :mod:`vla_ros.replay.report`.
"""
