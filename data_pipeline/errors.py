"""The exceptions that mean "the user can mend this": shown as a single line, exit status 2."""


class UserError(Exception):
    """A mistake in a command, a config or a data file. The message is one line and names the key or the file."""


class DamagedError(UserError):
    """Part of a data folder is not what was written: where the user allows it, a reader may go on without that part."""
