"""``python -m persample.demo [--quick] [--out FILE] [--seed N]``."""

import sys

from .command import main

sys.exit(main())
