"""Compares SPMD sharding strategies of JAX models on slices that need not be present."""

__version__ = "0.1.0"
