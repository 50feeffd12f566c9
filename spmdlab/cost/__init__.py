"""Prices the instructions of a program on a chip, without jax."""
