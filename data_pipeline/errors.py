"""The one exception that means "the user can mend this": shown as a single line, exit status 2."""


class UserError(Exception):
    """A mistake in a command, a config or a data file. The message is one line and names the key or the file."""
