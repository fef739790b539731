"""``python -m persample`` is the command ``persample``."""

from .cli import main

main()
