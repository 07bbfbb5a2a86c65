"""Weights and moments at a step: in processes, on disk, resumed."""
