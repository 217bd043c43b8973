"""The baseline of `lookup`: a ROUTER socket in front of a dict, in a process of its own.

    python -m kvtier_agent.bench.dict_server SOCKET

What a plain answer to "which of these keys are there" takes in Python with pyzmq and nothing else.
A message is one byte and a buffer of 16-byte keys: `p` adds the keys, `l` is answered by one byte
for each key, 1 where it is there and 255 where it is not.
"""

from __future__ import annotations

import sys

import zmq

from kvtier_agent.cache.identity import KEY_BYTES

ADD, LOOK_UP = b"p", b"l"
THERE, MISSING = 1, 255


def serve(path: str) -> None:
    """Answers until the process is ended."""
    context = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    socket.bind(f"ipc://{path}")
    table: dict[bytes, int] = {}
    while True:
        identity, order, keys = socket.recv_multipart()
        if order == ADD:
            table.update((keys[i : i + KEY_BYTES], THERE) for i in range(0, len(keys), KEY_BYTES))
            answer = b""
        else:
            get = table.get
            answer = bytes(
                [get(keys[i : i + KEY_BYTES], MISSING) for i in range(0, len(keys), KEY_BYTES)]
            )
        socket.send_multipart([identity, answer])


if __name__ == "__main__":
    serve(sys.argv[1])
