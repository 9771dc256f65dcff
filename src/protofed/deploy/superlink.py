"""Flower's SuperLink with its Control API locked, run as a separate program.

All its interfaces share one port. Sites prove who they are by their keys, but whoever reaches the port could also
administer it: start runs, or register a key of his own. Here administration takes the secret that lies in a file on
the server, so that only those who can read that file are administrators.

It is run by its file and imports nothing of protofed, so that a process that only carries messages does not load
PyTorch. What it takes from Flower's inside is therefore here and not in deploy/flower.py: see `main`.

    python -P superlink.py SECRET_FILE [arguments of flower-superlink ...]
"""

import hmac
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

SECRET_HEADER = "x-protofed-administrator"

_Scope = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[Any]]
_Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class _ControlAuthMiddleware:
    """Lets through only requests of nodes and tasks, which Flower checks, and those with the administrator's secret."""

    def __init__(self, app: Callable[[_Scope, _Receive, _Send], Awaitable[None]], secret: bytes) -> None:
        self._app = app
        self._secret = secret

    async def __call__(self, scope: _Scope, receive: _Receive, send: _Send) -> None:
        """Pass on or refuse one request."""
        if scope["type"] == "http" and not self._is_allowed(scope):
            await send({"type": "http.response.start", "status": 403, "headers": []})
            await send({"type": "http.response.body", "body": b"for the administrator of this federation only"})
        else:
            await self._app(scope, receive, send)

    def _is_allowed(self, scope: _Scope) -> bool:
        if scope["path"].startswith(("/v1/fleet/", "/v1/runtime/")) or scope["path"] == "/health":
            return True
        secret = dict(scope["headers"]).get(SECRET_HEADER.encode(), b"")
        return hmac.compare_digest(secret, self._secret)


def main() -> None:
    """Serve until ended.

    This is `flower-superlink` of Flower 1.41.0 with a middleware. Where create_app, the lifespan or the parsing of
    options change, the SuperLink does not start; where the paths in `_is_allowed` change, sites are refused.
    """
    secret = Path(sys.argv.pop(1)).read_bytes()

    import uvicorn
    from flwr.supercore.http_logging import get_uvicorn_log_config
    from flwr.supercore.logger import console_handler
    from flwr.superlink.cli.flower_superlink import SuperLinkLifespan, _parse_superlink_lifespan_config
    from flwr.superlink.main import create_app

    config = _parse_superlink_lifespan_config()
    app = create_app(config, SuperLinkLifespan)
    app.add_middleware(_ControlAuthMiddleware, secret=secret)
    uvicorn.run(
        app,
        host=config.host,
        port=config.port,
        access_log=False,
        log_config=get_uvicorn_log_config(console_handler.level),
        ssl_keyfile=config.ssl_keyfile,
        ssl_certfile=config.ssl_certfile,
        workers=1,
    )


if __name__ == "__main__":
    main()
