"""`coordinator`: commands. Flags and environment become frozen settings here, errors become one line."""

from lamina.coordinator.cli.app import main

__all__ = ["main"]
