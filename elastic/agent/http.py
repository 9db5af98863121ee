"""The agent's page for people and commands: /status, /metrics, and /stop, /drain, /save.

HTTP on one port of the configured address, for whoever shows the agent's token as
`Authorization: Bearer <token>`; it stands in agent.json in the run directory, which only its owner
can read. Anybody else gets 401 and is noted as a stranger. Answers are JSON, save /metrics: that is
Prometheus text. Requests to change something are passed on and answered at once; what becomes of
them shows in /status.
"""

from __future__ import annotations

import hmac
import json
import socket
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from aiohttp import web

from elastic.membership import commands as c

SIGTERM = 15


class Surroundings(Protocol):
    """What the page needs of the agent."""

    def status(self) -> dict[str, Any]:
        """Return what /status shows."""
        ...

    def on_event(self, event: c.Event) -> None:
        """Give an event to the machine."""
        ...

    def on_stranger(self, address: str, reason: str) -> None:
        """Note a refused request."""
        ...


class StatusServer:
    """Serves the page.

    Args:
        host: address to listen on.
        token: what a request must show.
        port: 0 for any free one.
    """

    def __init__(self, host: str, token: str, surroundings: Surroundings, port: int = 0) -> None:
        self._token = token
        self.port = 0
        self._host = host
        self._wanted_port = port
        self._surroundings = surroundings
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        """Listen; `port` names where."""
        app = web.Application(middlewares=[self._check_token], client_max_size=1 << 16)
        app.add_routes(
            [
                web.get("/status", self._status),
                web.get("/metrics", self._metrics),
                web.post("/stop", self._stop),
                web.post("/drain", self._drain),
                web.post("/save", self._save),
            ]
        )
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((self._host, self._wanted_port))
        self.port = int(sock.getsockname()[1])
        # No access log, and signals are the agent's own.
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False)
        await self._runner.setup()
        await web.SockSite(self._runner, sock, shutdown_timeout=1.0).start()

    async def close(self) -> None:
        """Stop listening; requests under way have a second."""
        if self._runner is not None:
            await self._runner.cleanup()

    @web.middleware
    async def _check_token(
        self, request: web.Request, handler: Callable[[web.Request], Any]
    ) -> web.StreamResponse:
        shown = request.headers.get("Authorization", "")
        wanted = f"Bearer {self._token}"
        if not hmac.compare_digest(shown.encode(), wanted.encode()):
            peer = request.transport.get_extra_info("peername") if request.transport else None
            address = f"{peer[0]}:{peer[1]}" if isinstance(peer, tuple) else "unknown"
            reason = "it shows another token" if shown else "it shows no token"
            self._surroundings.on_stranger(address, f"{reason} ({request.method} {request.path})")
            return web.json_response({"error": "the token in agent.json is needed"}, status=401)
        answer: web.StreamResponse = await handler(request)
        return answer

    async def _status(self, _request: web.Request) -> web.Response:
        return web.json_response(self._surroundings.status(), dumps=_dumps)

    async def _metrics(self, _request: web.Request) -> web.Response:
        return web.Response(text=metrics(self._surroundings.status()), content_type="text/plain")

    async def _stop(self, request: web.Request) -> web.Response:
        """End the job on all nodes; {"now": true} does not wait for an agreed step."""
        asked = await _body(request)
        return self._ask(
            c.StopAsked(
                scope=c.Scope.JOB,
                cause=str(asked.get("cause") or "stopped by an operator"),
                signal=SIGTERM,
                at_once=asked.get("now") is True,
            )
        )

    async def _drain(self, request: web.Request) -> web.Response:
        """Have this node leave; the others go on."""
        asked = await _body(request)
        return self._ask(
            c.StopAsked(
                scope=c.Scope.NODE,
                cause=str(asked.get("cause") or "drained by an operator"),
                signal=SIGTERM,
            )
        )

    async def _save(self, _request: web.Request) -> web.Response:
        return self._ask(c.SaveAsked())

    def _ask(self, event: c.Event) -> web.Response:
        self._surroundings.on_event(event)
        return web.json_response({"ok": True}, status=202)


def metrics(status: Mapping[str, Any]) -> str:
    """Return the few figures of /metrics in Prometheus' text format."""
    saves = status["saves"]
    figures = [
        ("generation", "gauge", "Number of the World in force", status["generation"]),
        ("world_size", "gauge", "Workers of the World in force", len(status["world"])),
        ("committed_step", "gauge", "Newest committed step", status["committed_step"]),
        ("failures_total", "counter", "Deaths of workers on this node", status["failures"]),
        ("reshapes_total", "counter", "Changes of the World", status["reshapes"]),
        ("saves_in_flight", "gauge", "Checkpoints under way", len(saves["in_flight"])),
        (
            "saved_step",
            "gauge",
            "Step of the newest committed checkpoint",
            saves["last_committed_step"],
        ),
    ]
    label = f'{{job="{_escaped(status["job"])}",node="{_escaped(status["node"])}"}}'
    lines = []
    for name, kind, text, value in figures:
        lines += [f"# HELP everstep_{name} {text}", f"# TYPE everstep_{name} {kind}"]
        lines.append(f"everstep_{name}{label} {0 if value is None else value}")
    return "\n".join(lines) + "\n"


async def _body(request: web.Request) -> dict[str, Any]:
    try:
        asked = json.loads(await request.text() or "{}")
    except ValueError:
        return {}
    return asked if isinstance(asked, dict) else {}


def _dumps(value: Any) -> str:
    return json.dumps(value, default=str)


def _escaped(text: Any) -> str:
    return str(text).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
