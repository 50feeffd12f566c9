"""What people and other programs read: tables, JSON, HTML, Perfetto.  No jax."""
