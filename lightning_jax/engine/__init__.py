"""Prompts in, sampled tokens and log-probs out. Continuous batching, prefix cache, grammars."""
