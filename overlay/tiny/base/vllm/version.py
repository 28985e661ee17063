"""The version, and nothing that imports."""

__version__ = "0.18.1"
