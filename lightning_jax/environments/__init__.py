"""Tasks that come with a verifier of their own, made elsewhere."""
