"""Errors the command line turns into one sentence and an exit code; anything else is a bug and shows its traceback."""


class UserError(ValueError):
    """Something the user gave is wrong: says what, its value, and the repair, in one sentence."""

    exit_code = 2


class NonFiniteError(UserError):
    """A loss or gradient was NaN or Inf, and the run stopped before it reached the weights."""

    exit_code = 3


class StorageError(UserError):
    """The run folder could not be written: disk full, read-only, no permission."""

    exit_code = 4
