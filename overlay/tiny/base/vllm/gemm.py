"""A function that the overlay changes, so that a test can see which code runs."""


def chosen(rows):
    """Name the kernel for an input of so many rows."""
    if rows < 1:
        raise ValueError(f"an input has at least one row, not {rows}")
    return "library"
