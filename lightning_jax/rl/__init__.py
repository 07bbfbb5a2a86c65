"""Trajectories to credit, advantages, loss and update. Pure functions without I/O."""
