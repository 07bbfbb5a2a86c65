"""Search for better prompts."""
