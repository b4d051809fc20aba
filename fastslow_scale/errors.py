"""Failures that are nobody's mistake, in one line: exit status 1. For mistakes see `data_pipeline.errors`."""


class RunError(Exception):
    """The run cannot go on, for a reason outside this rank's own code. The message is one line."""
