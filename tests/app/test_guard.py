"""What the explorer's server refuses, without a server."""

import asyncio
from typing import Any

import pytest

from dtem.app import guard
from dtem.app.guard import Guard, host_allowed


@pytest.mark.parametrize(
    "text", ["127.0.0.1", "127.0.0.1:7860", "localhost", "LOCALHOST:80", "localhost.", "[::1]:7860"]
)
def test_loopback_names_are_answered(text: str) -> None:
    assert host_allowed(text, ())
    assert host_allowed(f"http://{text}", ())


@pytest.mark.parametrize(
    "text",
    [
        "",
        "evil.example",
        "evil.example:7860",
        "127.0.0.1.evil.example",
        "localhost.evil.example",
        "evil.example@127.0.0.1",
        "127.0.0.1:7860@evil.example",
        "127.0.0.1/evil.example",
        "[::1].evil.example",
        "2130706433",  # 127.0.0.1 as one number
        "0.0.0.0",
        "192.168.1.5",
        "[::2]",
        "null",
        "file://",
        "127.0.0.1 evil.example",
        "[",
    ],
)
def test_other_names_are_not(text: str) -> None:
    assert not host_allowed(text, ())
    assert not host_allowed(f"http://{text}", ())


def test_what_the_user_allows() -> None:
    assert host_allowed("box.lan:7860", {"Box.LAN"})
    assert not host_allowed("other.lan", {"box.lan"})
    assert host_allowed("192.168.1.5:7860", {"192.168.1.5"})
    assert not host_allowed("192.168.1.6", {"192.168.1.5"})
    assert host_allowed("[fe80::1]:7860", {"fe80::1"})


@pytest.mark.parametrize("everywhere", ["0.0.0.0", "::", "[::]"])
def test_a_server_on_all_addresses_answers_to_addresses_and_to_no_name(everywhere: str) -> None:
    assert host_allowed("192.168.1.5:7860", {everywhere})
    assert host_allowed("[fe80::1]", {everywhere})
    assert not host_allowed("evil.example", {everywhere})


class Client:
    """One request to the guard: chunks of its body, each after a pause."""

    def __init__(self, *chunks: bytes, pause: float = 0.0, **headers: str) -> None:
        self.chunks, self.pause = list(chunks) or [b""], pause
        pairs = {"host": "127.0.0.1", **headers}
        self.scope = {
            "type": "http",
            "method": "POST",
            "path": "/gradio_api/upload",
            "headers": [(name.encode(), value.encode()) for name, value in pairs.items()],
        }
        self.sent: list[dict[str, Any]] = []

    async def receive(self) -> dict[str, Any]:
        if not self.chunks:
            await asyncio.sleep(3600)
        await asyncio.sleep(self.pause)
        body = self.chunks.pop(0)
        return {"type": "http.request", "body": body, "more_body": bool(self.chunks)}

    async def send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)

    def status(self, app: Any, **settings: Any) -> int:
        asyncio.run(Guard(app, **settings)(self.scope, self.receive, self.send))
        return self.sent[0].get("status", 0)

    @property
    def text(self) -> str:
        return b"".join(message.get("body", b"") for message in self.sent).decode()


async def read_all(scope: Any, receive: Any, send: Any) -> None:
    """An application that reads the request and answers with its size."""
    size, more = 0, True
    while more:
        message = await receive()
        size, more = size + len(message["body"]), message["more_body"]
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": str(size).encode()})


async def read_all_or_400(scope: Any, receive: Any, send: Any) -> None:
    """One that catches errors, as FastAPI does while it parses."""
    try:
        await read_all(scope, receive, send)
    except Exception:
        await send({"type": "http.response.start", "status": 400, "headers": []})
        await send({"type": "http.response.body", "body": b"parsing"})


def test_a_request_passes_and_gets_the_policy() -> None:
    client = Client(b"abc", b"de", origin="http://localhost:7860")
    assert client.status(read_all) == 200
    assert client.text == "5"
    assert (b"content-security-policy", guard.POLICY.encode()) in client.sent[0]["headers"]


@pytest.mark.parametrize(
    "headers", [{"host": "evil.example"}, {"host": ""}, {"origin": "http://evil.example"}, {"origin": "null"}], ids=str
)
def test_other_hosts_and_origins_get_421(headers: dict[str, str]) -> None:
    client = Client(**headers)
    assert client.status(read_all) == 421
    assert f"does not answer to this {next(iter(headers))}" in client.text
    assert "--allowed-host" in client.text


def test_a_request_without_a_host_gets_421() -> None:
    client = Client()
    client.scope["headers"] = []
    assert client.status(read_all) == 421


def test_an_allowed_name_passes() -> None:
    client = Client(host="box.lan:7860", origin="http://box.lan:7860")
    assert client.status(read_all, names={"box.lan"}) == 200


def test_a_websocket_of_another_host_is_closed() -> None:
    client = Client(host="evil.example")
    client.scope["type"] = "websocket"
    client.status(read_all)
    assert client.sent == [{"type": "websocket.close", "code": 1008}]


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "BODY_SECONDS", 0.2)


@pytest.mark.usefixtures("_impatient")
@pytest.mark.parametrize("app", [read_all, read_all_or_400])
def test_a_slow_upload_is_cut_off(app: Any) -> None:
    client = Client(*[b"x"] * 1000, pause=0.05)
    assert client.status(app) == 408
    assert "more than 0.2 seconds" in client.text
    assert (b"connection", b"close") in client.sent[0]["headers"]
    assert len(client.chunks) > 900


@pytest.mark.usefixtures("_impatient")
def test_waiting_for_the_end_of_a_connection_takes_any_time() -> None:
    async def stream(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        waiting = asyncio.ensure_future(receive())
        await asyncio.sleep(0.4)
        assert not waiting.done()
        waiting.cancel()
        await send({"type": "http.response.start", "status": 200, "headers": []})

    assert Client(b"x").status(stream) == 200


@pytest.mark.parametrize("app", [read_all, read_all_or_400])
def test_a_request_has_a_largest_size(app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "BODY_BYTES", 2_000_000)
    assert Client(*[b"x" * 500_000] * 4).status(app) == 200
    client = Client(*[b"x" * 500_000] * 50)
    assert client.status(app) == 413
    assert "more than 2 MB" in client.text
    assert len(client.chunks) == 45


def test_errors_of_the_application_are_not_hidden() -> None:
    async def broken(scope: Any, receive: Any, send: Any) -> None:
        raise KeyError("lost")

    with pytest.raises(KeyError, match="lost"):
        Client().status(broken)
