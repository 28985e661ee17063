"""A module that the overlay deletes."""

LEFT_OVER = True
