"""Train any LLM agent with reinforcement learning, in JAX."""
