"""The error hierarchy of the contract. Each type is mapped once to a gRPC status (wire.status) and once to HTTP.

A message is one line: what failed, where, and what to do about it. Nothing here knows of gRPC or HTTP.
"""


class LaminaError(Exception):
    """Root of every failure that lamina reports on purpose."""


class InvalidRequest(LaminaError):
    """The caller asked for something malformed or out of range."""


class InvalidConfig(InvalidRequest):
    """A flag, environment variable or configuration file is wrong; the message names it (and its line)."""


class InvalidSplit(InvalidRequest):
    """The layer split does not tile the model or names an unknown worker."""


class InvalidPlan(LaminaError):
    """A step plan or a frame contradicts the contract (wrong rows, unknown sequence, missing blocks)."""


class InvalidCheckpoint(LaminaError):
    """A model file is not what it should be: not GGUF, truncated, hostile, or its digest differs."""


class UnsupportedModel(LaminaError):
    """The file is sound, but its architecture, tokenizer or tensor type is one that lamina cannot run."""


class CapacityExceeded(LaminaError):
    """Memory, blocks or queue slots asked for exceed what is free; the message has both numbers."""


class StaleEpoch(LaminaError):
    """A plan or frame belongs to a placement epoch that is no longer current."""


class VersionMismatch(LaminaError):
    """Peers disagree on protocol version, schema digest or settings digest; the message names both."""


class WorkerUnreachable(LaminaError):
    """No answer within the connect deadline."""


class WorkerLost(LaminaError):
    """A worker that took part in a placement is gone."""


class NumericalError(LaminaError):
    """A non-finite value at a stage boundary or in the logits."""


class Unavailable(LaminaError):
    """The operation is sound but not possible in the present state (not loaded yet, draining)."""
