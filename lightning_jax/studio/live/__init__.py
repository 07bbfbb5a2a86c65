"""Live page: a server of runs that one browser page shows while they train."""
