"""A hub on this machine that serves one model, for tests: no test uses a network.

It answers what huggingface_hub asks for a snapshot: the list of files, and each file by HEAD and
GET, whole or from a byte on.
"""

import hashlib
import json
import os
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """What is served, and what was asked.

    Attributes:
        name: hub id of the model.
        folder: its files.
        asked: (method, file, first byte) of every request for a file.
        cut: files whose next GET breaks off after half of their bytes.
        url: where it listens.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.folder = folder
        self.asked: list[tuple[str, str, int]] = []
        self.cut: set[str] = set()
        self.url = ""

    def environment(self, cache: Path) -> dict[str, str]:
        """Variables for a process that uses this hub and a cache of its own."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        return kept | {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(cache),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "NO_PROXY": "*",
        }


@contextmanager
def serving(hub: Hub):
    """Serve while entered."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self):
            self._answer(has_body=False)

        def do_GET(self):
            self._answer(has_body=True)

        def _answer(self, *, has_body: bool):
            path = self.path.partition("?")[0]
            if path.startswith(f"/api/models/{hub.name}/tree/"):
                rows = [
                    {
                        "type": "file", "path": file.name, "size": file.stat().st_size,
                        "oid": _etag(file),
                    }
                    for file in sorted(hub.folder.iterdir())
                ]  # fmt: skip
                self._send(200, json.dumps(rows).encode(), has_body, {})
            elif path.startswith(f"/api/models/{hub.name}"):
                files = [{"rfilename": file.name} for file in sorted(hub.folder.iterdir())]
                document = {"id": hub.name, "sha": COMMIT, "siblings": files}
                self._send(200, json.dumps(document).encode(), has_body, {})
            elif path.startswith(f"/{hub.name}/resolve/"):
                self._file(path.rpartition("/")[2], has_body)
            else:
                header = {"X-Error-Code": "RepoNotFound"}
                self._send(404, b'{"error": "Repository not found"}', has_body, header)

        def _file(self, name: str, has_body: bool):
            file = hub.folder / name
            if not file.is_file():
                self._send(404, b"", has_body, {"X-Error-Code": "EntryNotFound"})
                return
            data = file.read_bytes()
            wanted = self.headers.get("Range") or ""
            begin = int(wanted.removeprefix("bytes=").partition("-")[0]) if wanted else 0
            hub.asked.append((self.command, name, begin))
            headers = {
                "ETag": f'"{_etag(file)}"',
                "X-Repo-Commit": COMMIT,
                "Accept-Ranges": "bytes",
            }
            if begin:
                headers["Content-Range"] = f"bytes {begin}-{len(data) - 1}/{len(data)}"
            part = data[begin:]
            self._send(206 if begin else 200, part, has_body, headers, cut=name in hub.cut)

        def _send(self, status, body, has_body, headers, *, cut=False):
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if not has_body:
                return
            if cut:
                self.wfile.write(body[: len(body) // 2])
                self.wfile.flush()
                self.close_connection = True
                return
            self.wfile.write(body)

        def log_message(self, *arguments):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _etag(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()
