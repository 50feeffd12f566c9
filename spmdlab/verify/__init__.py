"""Proof that strategies compute the same thing: each step against one device."""
