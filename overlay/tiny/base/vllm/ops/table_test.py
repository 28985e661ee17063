"""A module that the overlay renames."""


def table():
    return {"rows": 1}
