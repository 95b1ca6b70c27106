"""Errors the command line turns into one sentence and an exit code; anything else is a bug and shows its traceback."""

import errno
from collections.abc import Iterator

STORAGE_FAULTS = {
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO),
    *(errno.EACCES, errno.EPERM, errno.ESTALE),
}


class UserError(ValueError):
    """Something the user gave is wrong: says what, its value, and the repair, in one sentence."""

    exit_code = 2


class NonFiniteError(UserError):
    """A loss or gradient was NaN or Inf, and the run stopped before it reached the weights."""

    exit_code = 3


class NonFiniteStateError(NonFiniteError):
    """A weight, a buffer or the optimizer's state is NaN or Inf, and was not saved."""


class StorageError(UserError):
    """The run folder could not be written: disk full, read-only, no permission."""

    exit_code = 4


def storage_sentence(error: OSError) -> str | None:
    """A fault of the disk or its permissions in one sentence; None for any other error."""
    if error.errno not in STORAGE_FAULTS:
        return None
    where = f" {error.filename}" if error.filename else ""
    return f"cannot write or read{where}: {error.strerror}; free space there or change its permissions"


def chain_of(error: BaseException) -> Iterator[BaseException]:
    """An error, what it came from, and so on."""
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__ or found.__context__


def first_cause(error: BaseException) -> str:
    """What an error came from, in one line: ending a capture that ran out of memory fails too, and hides the reason."""
    *_, cause = chain_of(error)
    return (str(cause).strip() or type(cause).__name__).splitlines()[0]
