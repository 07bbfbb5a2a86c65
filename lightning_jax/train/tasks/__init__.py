"""Tasks, demonstrations and groups that a run learns from, and their order."""
