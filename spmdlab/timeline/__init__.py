"""Replays a priced schedule."""
