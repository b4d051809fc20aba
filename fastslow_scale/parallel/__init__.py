"""Ranks, groups and the collectives that tie the fast and the slow path."""
