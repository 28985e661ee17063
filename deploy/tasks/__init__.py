"""One module for each namespace of tasks; tasks.py gathers them."""
