"""``bicovg`` and ``python -m bicovg``."""

import os
import sys
from typing import NoReturn

from bicovg.cli import main


def run() -> NoReturn:
    """Run the command line and end the process with its exit code.

    One that has lost others of its run ends at once: threads of its connections may still hold tensors, and would abort
    Python as it winds up, with another exit code.
    """
    code = main()
    distributed = sys.modules.get("bicovg.distributed")
    if distributed is not None and distributed.is_connected():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    run()
