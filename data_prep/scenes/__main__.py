"""The server process: settings on standard input, the base URL on standard output; ends when standard input does."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys

from data_prep.scenes.config import ScenesConfig
from data_prep.scenes.server import HOST, SceneServer
from pipeline.config import parse


async def _main() -> None:
    settings = json.loads(sys.stdin.readline())
    service = SceneServer(parse(ScenesConfig, settings["config"]))
    try:
        server = await asyncio.start_server(service.connection, HOST, settings["port"], backlog=1024)
    except OSError as error:
        print(os.strerror(error.errno or 0), flush=True)
        return
    print(f"http://{HOST}:{server.sockets[0].getsockname()[1]}", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    server.close()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; when to end is the parent's choice
    asyncio.run(_main())
