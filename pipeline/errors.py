"""The one exception type whose message is written for the person at the terminal."""


class UserError(ValueError):
    """Something the user can mend: says what was given, what is allowed and what to do next.

    The command line prints its message as one paragraph, without a traceback, and exits with 2.
    """
