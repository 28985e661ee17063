"""A registry on a free port of 127.0.0.1, which an engine speaks to without TLS."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

_CONFIG = """\
version: 0.1
storage: {{filesystem: {{rootdirectory: {folder}/data}}, delete: {{enabled: true}}}}
http: {{addr: "127.0.0.1:{port}"}}
log: {{level: error}}
"""


@contextlib.contextmanager
def small_registry(folder: Path) -> Iterator[str]:
    """The registry's HOST:PORT, for the time of the block."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    folder.mkdir(parents=True)
    config = folder / "config.yml"
    config.write_text(_CONFIG.format(folder=folder, port=port))
    argv = ("docker-registry", "serve", str(config))
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(argv, stdout=log, stderr=log)
    try:
        _wait(f"http://127.0.0.1:{port}/v2/")
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(20)


def _wait(url: str) -> None:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    end = time.monotonic() + 20
    while True:
        try:
            opener.open(url, timeout=5).close()
            return
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.1)
