"""``bicovg`` and ``python -m bicovg``."""

import io
import sys
import traceback
from typing import NoReturn

from bicovg.cli import main


def run() -> NoReturn:
    """Run the command line and end the process with its exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        # a file's name need not be text, nor in the terminal's letters
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code = main()
    except Exception:
        if not is_one_of_several():
            raise
        traceback.print_exc()
        code = 1
    if is_one_of_several():
        sys.modules["bicovg.distributed"].end_process(code)
    sys.exit(code)


def is_one_of_several() -> bool:
    """Whether this process has met others of its run; asked without importing torch."""
    distributed = sys.modules.get("bicovg.distributed")
    return distributed is not None and distributed.has_met


if __name__ == "__main__":
    run()
