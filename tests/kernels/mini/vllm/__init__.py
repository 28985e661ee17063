"""The package of the mini tree."""

__version__ = "0.18.1"
