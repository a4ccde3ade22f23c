"""What the explorer's server refuses: other host names (DNS rebinding), and uploads that are too slow or too large.

ASGI middleware; knows nothing of gradio.
"""

import asyncio
import ipaddress
import re
from collections.abc import Callable, Collection
from typing import Any

BODY_SECONDS = 30.0
"""A request must arrive within this time."""
BODY_BYTES = 11_000_000
"""Largest request: a file of 10 MB with its form."""
# Everything comes from this server: the browser blocks anything else.
POLICY = "default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:; connect-src 'self'; form-action 'self'"
_HOST = re.compile(r"(?:https?://)?(\[[0-9a-f:.]+\]|[^\s\[\]:@/]+)(?::\d{1,5})?", re.IGNORECASE)


def host_allowed(text: str, names: Collection[str]) -> bool:
    """Whether a ``Host`` or ``Origin`` header names a loopback address, ``localhost``, or one of `names`.

    An unspecified address among `names` (``0.0.0.0``, ``::``) allows every address, but no other name: a page of
    another site can point its own name at this machine, and cannot do so with an address.
    """
    match = _HOST.fullmatch(text)
    if match is None:
        return False
    name = match[1].strip("[]").rstrip(".").lower()
    known = {other.strip("[]").lower() for other in names}
    if name == "localhost" or name in known:
        return True
    address = _address(name)
    return address is not None and (address.is_loopback or any(_unspecified(other) for other in known))


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


def _unspecified(name: str) -> bool:
    address = _address(name)
    return address is not None and address.is_unspecified


class Guard:
    """Refuse requests of other hosts, and those that are too slow or too large; add the content-security policy.

    Args:
        app: the ASGI application.
        names: host names and addresses to answer to, besides those of this machine alone.
        before_upload: called before a file is received.
    """

    def __init__(self, app: Any, names: Collection[str] = (), before_upload: Callable[[], None] | None = None) -> None:
        self.app = app
        self.names = names
        self.before_upload = before_upload

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        headers = {name.lower(): value.decode("latin-1") for name, value in scope["headers"]}
        for header in (b"host", b"origin"):
            if not host_allowed(headers.get(header, "localhost" if header == b"origin" else ""), self.names):
                text = f"this server does not answer to this {header.decode()}; dtem app --allowed-host NAME allows it"
                await _refuse(scope, send, 421, text)
                return
        if scope["type"] == "websocket":
            await self.app(scope, receive, send)
            return
        if self.before_upload is not None and scope["method"] == "POST" and scope["path"].endswith("/upload"):
            self.before_upload()
        request = _Request(receive, send)
        try:
            await self.app(scope, request.receive, request.send)
        except Exception:
            if request.refusal is None:
                raise
        if request.refusal is not None and not request.answered:
            await _refuse(scope, send, *request.refusal)


class _Request:
    """One request whose body has a deadline and a largest size."""

    def __init__(self, receive: Any, send: Any) -> None:
        self._receive, self._send = receive, send
        self._deadline: float | None = None
        self._size = 0
        self._complete = False
        self.answered = False
        self.refusal: tuple[int, str] | None = None

    async def receive(self) -> Any:
        if self._complete:  # what comes now is the end of the connection, which may take any time
            return await self._receive()
        if self._deadline is None:
            self._deadline = asyncio.get_running_loop().time() + BODY_SECONDS
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._receive()
        except TimeoutError:
            self.refusal = 408, f"the request took more than {BODY_SECONDS:g} seconds to arrive"
            raise
        self._size += len(message.get("body", b""))
        self._complete = not message.get("more_body", False)
        if self._size > BODY_BYTES:
            self.refusal = 413, f"the request has more than {BODY_BYTES // 1_000_000} MB"
            raise ValueError(self.refusal[1])
        return message

    async def send(self, message: Any) -> None:
        if self.refusal is not None and not self.answered:
            return  # the application's answer to the exception above
        if message["type"] == "http.response.start":
            self.answered = True
            message["headers"] = [*message["headers"], (b"content-security-policy", POLICY.encode())]
        await self._send(message)


async def _refuse(scope: Any, send: Any, status: int, text: str) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008})
        return
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": text.encode()})
