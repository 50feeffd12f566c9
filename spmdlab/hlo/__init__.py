"""Reads optimised HLO text, without jax: programs, loops, collectives, owners."""
