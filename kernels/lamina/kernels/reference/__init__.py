"""The reference backend: plain numpy, the oracle of every other one."""

from lamina.kernels.reference.backend import ReferenceBackend

__all__ = ["ReferenceBackend"]
