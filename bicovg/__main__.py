"""``python -m bicovg``."""

import sys

from bicovg.cli import main

sys.exit(main())
