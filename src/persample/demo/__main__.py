"""``python -m persample.demo [--quick] [--out FILE] [--picture FILE.svg] [--seed N]``."""

import sys

from .command import main

sys.exit(main())
