"""Pipeline schedules as data, and what follows from them.  Imports no jax."""
