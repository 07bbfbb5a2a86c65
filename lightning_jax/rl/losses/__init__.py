"""Losses of the policy, and the terms that they are made of."""
