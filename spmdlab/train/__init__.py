"""The training state and the optimizer step."""
