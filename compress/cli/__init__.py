"""The `compress` command; every subcommand has a file of its own, and app.py assembles them."""

from .app import main

__all__ = ["main"]
