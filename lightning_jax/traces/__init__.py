"""Record of a run: SQLite store, spans, rewards, and the trajectories made from them."""
