"""Lines of their own between an ingress and a driver: heartbeats, the end of requests and choices, subscriptions.

Serve sends no call to a replica that drains, and a driver that drains still needs its leases renewed and its
aborts. A streaming call through Serve takes milliseconds of CPU for each message, at both ends together, and a
subscription has one for every step. Calls are one JSON array a line, answered in order, over TCP; a subscription
has a connection of its own, which after the call carries messages, each behind its length, and ends with an empty
one. The driver's secret reaches the ingress through Serve. Knows the calls; knows nothing of Serve or leases.
"""

import asyncio
import hmac
import json
import logging
import secrets
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import suppress
from typing import Any, Protocol

from cluster.driver.status import DriverStatus, LifelineAddress
from cluster.errors import Unavailable

logger = logging.getLogger(__name__)

_BEAT = "beat"
_ABORT = "abort"
_FINISH = "finish"
_SUBSCRIBE = "subscribe"
_LENGTH_BYTES = 4  # big-endian, before each message of a subscription
_ANSWER_S = 5.0  # for a line to be opened, and for each answer
_RETRY_AFTER_S = 5.0  # what becomes of a driver that is gone: Serve replaces it


class CalledDriver(Protocol):
    """What of a driver is called over a line."""

    def subscribe(self, subscriber_id: str) -> AsyncIterator[bytes]: ...

    async def heartbeat(self, subscriber_id: str) -> DriverStatus: ...

    async def abort(self, request_id: str) -> None: ...

    async def finish_choice(self, request_id: str, choice: int) -> None: ...

    def line_lost(self, subscriber_id: str) -> None:
        """The line over which this one beat has ended."""
        ...


class LifelineServer:
    """The driver's end, on its event loop. `close()` ends every line; it is idempotent.

    The end of a line is seen within milliseconds of the death of whoever is at the other end.
    """

    def __init__(self, driver: CalledDriver) -> None:
        self._driver = driver
        self._token = secrets.token_urlsafe(32)
        self._server: asyncio.Server | None = None
        self._lines: set[asyncio.Task[None]] = set()

    async def open(self, host: str) -> LifelineAddress:
        """Listen on a free port of `host`. Raises OSError."""
        self._server = await asyncio.start_server(self._accept, host)
        port: int = self._server.sockets[0].getsockname()[1]
        return LifelineAddress(host, port, self._token)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        lines, self._lines = self._lines, set()
        for line in lines:
            line.cancel()
        await asyncio.gather(*lines, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._lines.add(task)
        try:
            await self._serve(reader, writer)
        except (OSError, ValueError, TypeError):
            logger.warning("a line of an ingress broke off, or said what makes no sense")
        except asyncio.CancelledError:
            pass  # by `close`; asyncio's own callback would report it as an error
        finally:
            self._lines.discard(task)
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(_ANSWER_S):
            greeting = (await reader.readline()).decode().strip()
        if not hmac.compare_digest(greeting.encode(), self._token.encode()):
            return
        beating: set[str] = set()
        try:
            while line := await reader.readline():
                call, name, *rest = json.loads(line)
                if call == _SUBSCRIBE:
                    await self._send_messages(writer, name)
                    return
                if call == _BEAT:
                    beating.add(name)
                answer = await self._answer(call, name, *rest)
                writer.write(json.dumps(answer).encode() + b"\n")
                await writer.drain()
        finally:
            for name in beating:
                self._driver.line_lost(name)

    async def _send_messages(self, writer: asyncio.StreamWriter, name: str) -> None:
        """To a reader that is slow, fewer and larger ones: the next is asked for when this one has left."""
        async for message in self._driver.subscribe(name):
            writer.write(len(message).to_bytes(_LENGTH_BYTES) + message)
            await writer.drain()
        writer.write(bytes(_LENGTH_BYTES))
        await writer.drain()

    async def _answer(self, call: str, name: str, *rest: int) -> list[Any]:
        if call == _BEAT:
            status = await self._driver.heartbeat(name)
            return [status.lease, status.running, status.waiting, status.unavailable_because]
        if call == _ABORT:
            await self._driver.abort(name)
        elif call == _FINISH:
            await self._driver.finish_choice(name, *rest)
        else:
            raise ValueError(f"no such call: {call}")
        return []


class Lifeline:
    """The ingress's end. A call opens it if it is not open, or has broken; close it when done. Each subscription
    has a connection of its own.
    """

    def __init__(self, address: LifelineAddress) -> None:
        self._address = address
        self._turn = asyncio.Lock()
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def heartbeat(self, subscriber_id: str) -> DriverStatus:
        """Raises `Unavailable` when the driver cannot be reached, or does not answer."""
        lease, running, waiting, unavailable_because = await self._call(_BEAT, subscriber_id)
        return DriverStatus(lease, running, waiting, unavailable_because)

    async def abort(self, request_id: str) -> None:
        """Raises `Unavailable`, as above."""
        await self._call(_ABORT, request_id)

    async def finish_choice(self, request_id: str, choice: int) -> None:
        """Raises `Unavailable`, as above."""
        await self._call(_FINISH, request_id, choice)

    async def subscribe(self, subscriber_id: str) -> AsyncGenerator[bytes, None]:
        """All messages for this subscriber until the driver ends them. Raises `Unavailable` when it is gone."""
        writer = None
        try:
            async with asyncio.timeout(_ANSWER_S):
                reader, writer = await self._open()
                writer.write(_packed(_SUBSCRIBE, subscriber_id))
                await writer.drain()
            while length := int.from_bytes(await reader.readexactly(_LENGTH_BYTES)):
                yield await reader.readexactly(length)
        except TimeoutError:
            raise Unavailable(f"the driver did not answer within {_ANSWER_S:g} s") from None
        except asyncio.IncompleteReadError:
            raise Unavailable("the driver is gone: it has closed the line", retry_after_s=_RETRY_AFTER_S) from None
        except OSError as error:
            raise Unavailable(f"the driver is gone: {error}", retry_after_s=_RETRY_AFTER_S) from None
        finally:
            _close(writer)

    async def close(self) -> None:
        """End the line of calls. Idempotent."""
        self._drop()

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(self._address.host, self._address.port)
        writer.write(self._address.token.encode() + b"\n")
        return reader, writer

    async def _call(self, *message: object) -> list[Any]:
        try:
            async with asyncio.timeout(_ANSWER_S), self._turn:
                return await self._ask(_packed(*message))
        except TimeoutError:
            raise Unavailable(f"the driver did not answer within {_ANSWER_S:g} s") from None
        except (OSError, ValueError) as error:
            raise Unavailable(f"the driver cannot be reached: {error}") from None

    async def _ask(self, line: bytes) -> list[Any]:
        answered = False
        try:
            if self._reader is None or self._writer is None:
                self._reader, self._writer = await self._open()
            self._writer.write(line)
            await self._writer.drain()
            answer: list[Any] = json.loads(await self._reader.readline())
            answered = True
        finally:
            if not answered:  # what comes now would be taken for the answer to another call
                self._drop()
        return answer

    def _drop(self) -> None:
        writer, self._reader, self._writer = self._writer, None, None
        _close(writer)


def _packed(*message: object) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _close(writer: asyncio.StreamWriter | None) -> None:
    if writer is not None:
        with suppress(RuntimeError):  # its loop has gone
            writer.close()
