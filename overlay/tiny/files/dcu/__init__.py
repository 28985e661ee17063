"""A new package."""
