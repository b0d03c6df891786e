"""The listening socket: what its connections inherit."""

from __future__ import annotations

import socket

from server.serve import KEEPALIVE, bind


def test_connections_of_clients_that_vanished_end() -> None:
    """Without the options uvicorn keeps a connection that never asked, and its descriptor, for
    ever.
    """
    with bind("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
            for name, value in KEEPALIVE.items():
                assert accepted.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) == value
