"""Speed of the built-in corpus: scenes described and drawn per second, and responses per second of its server.

    python -m jobs.bench.scenes --count 2000 --connections 8

Drawing uses one core. Threads of this process send requests to the server over keep-alive connections, so that client
and server share the machine as in the demo. URLs with injected faults are skipped.
"""

from __future__ import annotations

import http.client
import time
from concurrent.futures import ThreadPoolExecutor

import click


@click.command()
@click.option("--count", default=2_000, show_default=True, help="Number of scenes.")
@click.option("--connections", default=8, show_default=True)
@click.option("--size", default=96, show_default=True, help="Side of an image in pixels.")
def main(count: int, connections: int, size: int) -> None:
    from data_prep.scenes import Fault, ScenesConfig, fault_of, serve_scenes
    from data_prep.scenes.caption import web
    from data_prep.scenes.render import jpeg
    from data_prep.scenes.scene import describe

    config = ScenesConfig(image_size=size)
    for index in range(200):  # warm up: backgrounds are drawn once per process
        jpeg(config, index)
    steps = {"described": describe, "captioned": web, "drawn and encoded": jpeg}
    for name, function in steps.items():
        start = time.perf_counter()
        for index in range(count):
            function(config, index)
        click.echo(f"{name:<20} {count / (time.perf_counter() - start):10,.0f} /s")

    good = [index for index in range(count) if fault_of(config, index) is Fault.NONE]
    with serve_scenes(config) as base, ThreadPoolExecutor(connections) as pool:
        shares = [good[k::connections] for k in range(connections)]
        start = time.perf_counter()
        received = sum(pool.map(_ask, [base.removeprefix("http://")] * connections, shares))
        seconds = time.perf_counter() - start
    click.echo(f"{'served':<20} {len(good) / seconds:10,.0f} /s  {received / len(good):,.0f} bytes each")


def _ask(host: str, indices: list[int]) -> int:
    """Fetch these scenes over one connection. Returns the bytes received."""
    connection = http.client.HTTPConnection(host, timeout=10)
    received = 0
    for index in indices:
        connection.request("GET", f"/scenes/0/{index}.jpg")
        received += len(connection.getresponse().read())
    connection.close()
    return received


if __name__ == "__main__":
    main()
