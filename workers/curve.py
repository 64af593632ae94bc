"""Who may connect to a driver's sockets over the network: keys for one incarnation and a list of those admitted.

CURVE encrypts and proves that a peer talks to the right server, but by itself admits every client that knows the
server's public key. The ZAP handler here admits a socket's own workers and no one else. Knows keys and sockets;
knows nothing of messages.
"""

from dataclasses import dataclass, field

import zmq
from zmq.auth.thread import ThreadAuthenticator


@dataclass(frozen=True, slots=True)
class ClientKeys:
    """What one worker needs to connect. Travels to it inside its endpoint, over Ray."""

    server_public: bytes
    public: bytes
    secret: bytes = field(repr=False)

    def apply(self, socket: "zmq.Socket[bytes]") -> None:
        """Make `socket` prove that it is this worker. Before it connects."""
        socket.curve_serverkey = self.server_public
        socket.curve_publickey = self.public
        socket.curve_secretkey = self.secret


class Gate:
    """The server's key pair and the clients that each of its sockets admits, for the sockets of one context.

    Must be made before the sockets are bound, and closed before their context is.
    """

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", num_clients: int) -> None:
        self._public, self._secret = zmq.curve_keypair()
        self.clients = tuple(ClientKeys(self._public, *zmq.curve_keypair()) for _ in range(num_clients))
        self._authenticator = ThreadAuthenticator(context)
        self._authenticator.start()

    def guard(self, socket: "zmq.Socket[bytes]", name: str, clients: tuple[ClientKeys, ...]) -> None:
        """Let only `clients` connect to `socket`. Before it binds; `name` must be new."""
        self._authenticator.configure_curve_callback(
            name, credentials_provider=_Admits(frozenset(client.public for client in clients))
        )
        socket.zap_domain = name.encode("ascii")
        socket.zap_enforce_domain = True  # without an answer from the handler nobody gets in
        socket.curve_server = True
        socket.curve_publickey = self._public
        socket.curve_secretkey = self._secret

    def close(self) -> None:
        """Idempotent."""
        self._authenticator.stop()


class _Admits:
    """What the authenticator asks about each client of one socket."""

    def __init__(self, keys: frozenset[bytes]) -> None:
        self._keys = keys

    def callback(self, domain: str, key: bytes) -> bool:
        return key in self._keys
