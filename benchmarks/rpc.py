"""Two workers of one thread against llama.cpp RPC with two servers of one thread: on loopback, and over 1 Gbit/s.

Figures: rpc.decode.MODEL.d0, rpc.prefill.MODEL.p128, rpc.streams8.MODEL on loopback; the same with `rpc.1gbit.` between
two network namespaces (tbf) with 0.15 ms added each way by a relay. Host A has the coordinator (or llama.cpp's client)
and the first worker (server), host B the second.
"""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager

from contest import (
    Contestant,
    ContestantFailed,
    Worker,
    child_environment,
    die_with_parent,
    free_port,
    start_ours,
    stop_process,
    wait_for_port,
)
from local import Case
from network import NoNetwork, TwoHosts
from peer import server_command, start_peer, use_isa_of_peer
from report import Report, argument_parser, stop_on_sigterm
from shapes import model_path

MODELS = ("smollm2", "llama1b", "qwen05b")
_PAIRS = (("rpc", False), ("rpc.1gbit", True))
_MAX_CONTEXT = 1024


def cases_of(model: str, *, quick: bool, two_hosts: bool) -> list[Case]:
    """The figures of one model; quick leaves out what says least for its time."""
    num_tokens = 48 if model == "smollm2" else 24
    decode, prefill = Case(model, 1, "decode", 0, num_tokens), Case(model, 1, "prefill", 128)
    streams = Case(model, 1, "streams", 8, 16)
    if not quick:
        return [decode, prefill, streams, Case(model, 1, "prefill", 512), Case(model, 1, "streams", 16, 16)]
    if two_hosts:
        return [decode, prefill] if model != "qwen05b" else []
    return [decode, prefill, streams] if model == "smollm2" else [decode, prefill]


def name_of(case: Case, prefix: str) -> str:
    """rpc.decode.smollm2.d0 and so on: the threads are always one."""
    return f"{prefix}.{case.name.replace('.t1', '')}"


@contextmanager
def rpc_servers(endpoints: Sequence[str], prefixes: Sequence[Sequence[str]]) -> Iterator[None]:
    """llama.cpp servers of one thread each."""
    servers: list[subprocess.Popen[str]] = []
    try:
        for endpoint, prefix in zip(endpoints, prefixes, strict=True):
            command = [*prefix, *server_command(endpoint, 1)]
            quiet = subprocess.DEVNULL
            servers.append(
                subprocess.Popen(
                    command, text=True, env=child_environment(), stdout=quiet, stderr=quiet, preexec_fn=die_with_parent
                )
            )
        yield
    finally:
        for server in servers:
            stop_process(server)


@contextmanager
def on_loopback(model: str, report: Report) -> Iterator[tuple[Contestant, Contestant]]:
    """Both systems, loaded, on 127.0.0.1."""
    with ExitStack() as stack:
        endpoints = [f"127.0.0.1:{free_port()}" for _ in range(2)]
        stack.enter_context(rpc_servers(endpoints, ((), ())))
        for endpoint in endpoints:
            wait_for_port("127.0.0.1", int(endpoint.rpartition(":")[2]))
        workers = [stack.enter_context(closing(Worker(f"bench{i}", threads=1))) for i in range(2)]
        ours, peer = stack.enter_context(closing(start_ours())), stack.enter_context(closing(start_peer()))
        yield _load(ours, peer, model, report, [worker.address for worker in workers], endpoints)


@contextmanager
def on_two_hosts(model: str, report: Report) -> Iterator[tuple[Contestant, Contestant]]:
    """Both systems, loaded, over two namespaces. Raises NoNetwork where there can be none."""
    with ExitStack() as stack:
        hosts = stack.enter_context(TwoHosts())
        report.facts["network"] = {"rtt_8k_us": round(hosts.round_trip_us(), 1), "rate": "1 Gbit/s (tbf)"}
        on_a, on_b = hosts.prefix(0), hosts.prefix(1)
        ports = [hosts.port() for _ in range(6)]
        listen = [f"{hosts.addresses[0]}:{ports[0]}", f"{hosts.addresses[1]}:{ports[1]}"]
        seen_from_b, seen_from_a = hosts.relay(1, ports[0]), hosts.relay(0, ports[1])
        for i, (prefix, advertise) in enumerate(((on_a, seen_from_b), (on_b, seen_from_a))):
            more = ["--edge-port", str(ports[4 + i])]  # relayed as well, from the same port of the other host
            worker = Worker(f"bench{i}", threads=1, listen=listen[i], advertise=advertise, prefix=prefix, more=more)
            stack.enter_context(closing(worker))
            hosts.wait_for(1 - i, hosts.relay(1 - i, ports[4 + i], entry_port=ports[4 + i]))
        servers = [f"{hosts.addresses[0]}:{ports[2]}", f"{hosts.addresses[1]}:{ports[3]}"]
        stack.enter_context(rpc_servers(servers, (on_a, on_b)))
        hosts.wait_for(0, servers[0])
        hosts.wait_for(1, servers[1])
        endpoints = [servers[0], hosts.relay(0, ports[3])]
        for endpoint in (seen_from_a, endpoints[1]):
            hosts.wait_for(0, endpoint)
        hosts.wait_for(1, seen_from_b)
        ours = stack.enter_context(closing(start_ours(prefix=on_a)))
        peer = stack.enter_context(closing(start_peer(prefix=on_a)))
        yield _load(ours, peer, model, report, [listen[0], seen_from_a], endpoints)


def _load(
    ours: Contestant, peer: Contestant, model: str, report: Report, workers: Sequence[str], endpoints: Sequence[str]
) -> tuple[Contestant, Contestant]:
    path = str(model_path(model))
    split = ours.ask("load", model=path, workers=list(workers))["split"]
    facts = peer.ask("load", model=path, threads=1, servers=list(endpoints), num_ctx=_MAX_CONTEXT)
    report.facts["peer"] = {"name": "llama.cpp", "version": facts["version"], "system": facts["system"]}
    print(f"rpc: {model}: lamina's layers {split}, llama.cpp's on {facts['layers']}", file=sys.stderr)
    return ours, peer


def measure(cases: Sequence[Case], prefix: str, pair: tuple[Contestant, Contestant], report: Report, n: int) -> None:
    """All the given cases on one pair of systems, `n` rounds each."""
    ours, peer = pair
    for case in cases:
        report.add(case.compare(ours, peer, n, name=name_of(case, prefix)))


def main() -> None:
    """Every model, on loopback and over two hosts."""
    parser = argument_parser(__doc__)
    parser.add_argument("--model", action="append", choices=MODELS, help="only this model; repeatable")
    args = parser.parse_args()
    stop_on_sigterm()
    report = Report("rpc", args)
    num_rounds = args.rounds or (3 if args.quick else 5)
    try:
        report.facts["isa"] = use_isa_of_peer()
        for prefix, two_hosts in _PAIRS:
            for model in args.model or MODELS:
                possible = cases_of(model, quick=args.quick, two_hosts=two_hosts)
                cases = [case for case in possible if report.wants(name_of(case, prefix))]
                if cases:
                    opened = (on_two_hosts if two_hosts else on_loopback)(model, report)
                    with opened as pair:
                        measure(cases, prefix, pair, report, num_rounds)
    except NoNetwork as error:
        print(f"rpc: the 1 Gbit/s figures are left out: {error}", file=sys.stderr)
    except (ContestantFailed, FileNotFoundError) as error:
        sys.exit(f"rpc: {error}")
    finally:
        report.finish()


if __name__ == "__main__":
    main()
