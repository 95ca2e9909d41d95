"""What `coordinator serve` says when it listens: lines to paste elsewhere, with addresses that others can reach."""

import ipaddress
import socket

from lamina.spec.address import Address

# Of the ranges for documentation (RFC 5737, RFC 3849): routed like the world outside, belonging to nobody.
_OUTSIDE = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
_WORKER_PORT = 50051


def announcement(model_name: str, listen: Address, join: Address | None) -> list[str]:
    """The lines: where the API is, what to start against it, and with `join` the command that adds a worker."""
    url = f"http://{reachable(listen)}"
    lines = [
        f"{model_name} at {url}, OpenAI base URL {url}/v1",
        f"  page:            {url}/",
        f"  chat:            coordinator chat --url {url}",
        f"  state:           coordinator status --url {url}",
    ]
    if join is not None:
        listening = "" if join.is_loopback else f" --listen 0.0.0.0:{_WORKER_PORT} --insecure"
        lines.append(f"  add a worker:    rpc-worker --join {reachable(join)}{listening}")
    return lines


def reachable(listen: Address) -> Address:
    """Where others find what listens there: for a wildcard the address of the way out, else the host's name."""
    families = {"0.0.0.0": (socket.AF_INET,), "::": (socket.AF_INET, socket.AF_INET6)}
    try:
        wildcard = families.get(str(ipaddress.ip_address(listen.host)), ())
    except ValueError:  # a name
        wildcard = ()
    if not wildcard:
        return listen
    hosts = (outgoing_host(family) for family in wildcard)
    return Address(next(filter(None, hosts), None) or socket.gethostname(), listen.port)


def outgoing_host(family: socket.AddressFamily) -> str | None:
    """This machine's address on the way out, None without one. Connecting a datagram socket sends no packet."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((_OUTSIDE[family], 9))
            return str(probe.getsockname()[0])
    except OSError:
        return None
