"""A stand-in for vLLM: the same top package name, a few files, no dependency."""

from vllm.version import __version__

__all__ = ["__version__"]
