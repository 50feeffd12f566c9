"""What the machines are: chips and how a slice of them is wired.  Imports no jax."""
