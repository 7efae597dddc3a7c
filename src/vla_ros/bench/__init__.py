"""``vla-ros bench``: how fast this machine answers, against the plain path and the limits of its hardware."""
