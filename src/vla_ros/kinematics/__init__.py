"""The arm's geometry: URDF, forward and inverse kinematics, rotations."""
