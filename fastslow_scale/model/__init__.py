"""The fast-slow decoder."""
