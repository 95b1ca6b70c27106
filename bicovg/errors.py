"""The one exception the command line turns into a sentence and exit code 2."""


class UserError(ValueError):
    """Something the user gave is wrong: says what, its value, and the repair, in one sentence."""
