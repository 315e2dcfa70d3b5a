"""The one exception for mistakes a user can make."""


class UserError(Exception):
    """A mistake in a config, a data file, a checkpoint, a server or a cluster layout.

    The message is one sentence that names the field, its value and what would be right.
    The command line prints it alone, without a traceback, and exits with `EXIT_CODE`.
    """

    EXIT_CODE = 2
