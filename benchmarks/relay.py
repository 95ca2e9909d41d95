"""A TCP relay that holds every byte for a while: distance, where the kernel has no netem. Owns nothing else.

python benchmarks/relay.py LISTEN_HOST:PORT TO_HOST:PORT DELAY_US
"""

import ctypes
import queue
import socket
import sys
import threading
import time

_CHUNK_BYTES = 1 << 16
_PR_SET_TIMERSLACK = 29


def set_timer_slack() -> None:
    """Let sleeps end on time instead of up to 50 us late; new threads inherit it. Does nothing outside Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)


def copy_late(source: socket.socket, target: socket.socket, delay_s: float) -> None:
    """Everything from source to target, each chunk `delay_s` after it came; the end of stream as well."""
    chunks: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()

    def send() -> None:
        while True:
            due, chunk = chunks.get()
            if (wait := due - time.perf_counter()) > 0:
                time.sleep(wait)
            try:
                if not chunk:
                    target.shutdown(socket.SHUT_WR)
                    return
                target.sendall(chunk)
            except OSError:  # the receiver hung up: the sender learns it by its own stream's end
                return

    threading.Thread(target=send, daemon=True).start()
    while True:
        try:
            chunk = source.recv(_CHUNK_BYTES)
        except OSError:
            chunk = b""
        chunks.put((time.perf_counter() + delay_s, chunk))
        if not chunk:
            return


def relay(listen: tuple[str, int], to: tuple[str, int], delay_s: float) -> None:
    """Accept for ever; every connection gets one of its own to `to`."""
    with socket.create_server(listen) as server:
        while True:
            near, _ = server.accept()
            far = socket.create_connection(to)
            for end in (near, far):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for source, target in ((near, far), (far, near)):
                threading.Thread(target=copy_late, args=(source, target, delay_s), daemon=True).start()


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host, int(port)


if __name__ == "__main__":
    set_timer_slack()
    sys.setswitchinterval(1e-4)
    relay(_address(sys.argv[1]), _address(sys.argv[2]), float(sys.argv[3]) / 1e6)
