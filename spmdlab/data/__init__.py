"""Data that every machine has.  NumPy only."""
