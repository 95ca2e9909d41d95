"""Which release, protocol and schema this side speaks, and whether a peer's fits (C-03, P-25)."""

import hashlib
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from lamina.spec.device import PROTOCOL_MAJOR, PROTOCOL_MINOR, Version
from lamina.spec.errors import VersionMismatch
from lamina.v1 import cluster_pb2, step_pb2, worker_pb2


@cache
def own_version() -> Version:
    """This side's version; the schema digest is SHA-256 over the serialized file descriptors."""
    digest = hashlib.sha256()
    for module in (step_pb2, worker_pb2, cluster_pb2):
        digest.update(module.DESCRIPTOR.serialized_pb)
    try:
        product = version("lamina")
    except PackageNotFoundError:  # run from a checkout, not installed
        product = "0+checkout"
    return Version(product, PROTOCOL_MAJOR, PROTOCOL_MINOR, digest.digest())


def check_peer(peer: Version, who: str) -> None:
    """Raise VersionMismatch, naming both versions, unless `peer` speaks the same major protocol and schema."""
    own = own_version()
    if peer.protocol_major != own.protocol_major:
        cause = "protocol versions differ"
    elif peer.schema_digest != own.schema_digest:
        cause = "wire schemas differ"
    else:
        return
    raise VersionMismatch(f"{cause}: {who} runs {peer}, this side {own}; install the same lamina release on both")
