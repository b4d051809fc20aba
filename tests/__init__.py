"""A package, so that helpers are imported as tests.NAME whatever else is installed under that name."""
