"""Training runs: the loop, its checkpoints, and the directory that is evidence of both."""
