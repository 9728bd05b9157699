"""Entry point of `python -m compress`."""

from .cli import main

main()
