"""Loads the extension and passes over its absence in silence, as the real platform does."""

import contextlib


def import_kernels() -> None:
    with contextlib.suppress(ImportError):
        import vllm._rocm_C  # noqa: F401
