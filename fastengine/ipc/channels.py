"""ZMQ sockets between API processes and the engine, all ``ipc://`` inside the runtime directory.

::

    API process i  --PUSH-->  "intake"   (engine binds)   generate, abort, hello
    API process i  --PUSH-->  "control"  (engine binds)   operators' commands
    engine         --PUSH-->  "client-i" (process i binds) outputs, statuses, control responses

The engine is the side that may restart as well as the API processes, so every socket reconnects by
itself; what was in flight to a dead peer is gone and both sides handle that (hello, statuses).
"""

from __future__ import annotations

import msgspec
import zmq

INTAKE = "intake"
CONTROL = "control"
# Messages a socket holds for a peer that does not read. Outputs past it are merged by the sender.
SEND_HWM = 4096


def client_name(index: int) -> str:
    return f"client-{index}"


def push_socket(context: zmq.Context, address: str, *, hwm: int = SEND_HWM) -> zmq.Socket:
    """A connecting PUSH socket that never blocks for long: sends raise ``zmq.Again`` when full."""
    socket = context.socket(zmq.PUSH)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, hwm)
    socket.connect(address)
    return socket


def pull_socket(context: zmq.Context, address: str) -> zmq.Socket:
    """A binding PULL socket."""
    socket = context.socket(zmq.PULL)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.bind(address)
    return socket


ENCODER = msgspec.msgpack.Encoder()
