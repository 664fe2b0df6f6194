"""Ports that stay a test's own between being chosen and being listened on."""

import socket


def hold_port() -> socket.socket:
    """Return a bound socket: until it is closed nobody who asks for any free port, or connects from one, gets its.

    Whoever is told the number can listen there meanwhile, for servers set SO_REUSEADDR as this one does.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    return held


def number_of(held: socket.socket) -> int:
    return int(held.getsockname()[1])
