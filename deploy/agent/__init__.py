"""The only code that changes a target.

Standard library only, Python 3.10 to 3.13, and no import from outside this package: its files are
packed byte for byte into every bundle and run there as ``python3 -I -S``.
"""
