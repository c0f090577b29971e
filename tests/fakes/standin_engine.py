"""A process that answers as an engine or a router does, for tests of whoever starts and watches those: on the standard library, in 0.1 s.

    python standin_engine.py PORT [--after S] [--worker URL]... [--deaf] [--leave] [--dies TEXT]

--after: it answers only after so many seconds, and says what it does meanwhile as SGLang does. --worker: it is a router of these. --deaf:
it ignores SIGTERM. --leave: it starts a daemon in a session of its own. --dies: it ends while it starts, with a traceback.
"""

from __future__ import annotations

import argparse
import http.server
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from typing import Any, ClassVar

OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Answers(http.server.BaseHTTPRequestHandler):
    """Routes of both."""

    protocol_version = "HTTP/1.1"
    workers: ClassVar[list[str]] = []
    paths: ClassVar[list[str]] = []
    """All that were asked for, in order."""

    def do_GET(self) -> None:
        self.paths.append(self.path)
        if self.path == "/workers":
            rows = [{"url": url, "is_healthy": self.ask(url), "worker_type": "regular"} for url in self.workers]
            return self.reply({"workers": rows, "total": len(rows)})
        if self.path == "/model_info":
            return self.reply({"model_path": "m", "weight_version": "default", "architectures": ["Standin"]})
        if self.path == "/server_info":
            rank = {"effective_max_running_requests_per_dp": 64}
            return self.reply({"max_total_num_tokens": 16_384, "context_length": 2048, "internal_states": [rank]})
        if self.path == "/asked":
            return self.reply({"paths": self.paths})
        return self.reply({"pid": os.getpid()})

    def ask(self, url: str) -> bool:
        """Whether a worker answers."""
        try:
            with OPENER.open(f"{url}/model_info", timeout=1) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def reply(self, body: dict[str, Any]) -> None:
        """One JSON answer."""
        raw = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, format: str, *args: Any) -> None:
        """The log is for what the start says."""


def start(port: int) -> http.server.ThreadingHTTPServer:
    """Answers on a loopback port, in threads."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def main() -> None:
    """Serves until it is ended."""
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("--after", type=float, default=0.0)
    parser.add_argument("--worker", action="append", default=[])
    parser.add_argument("--deaf", action="store_true")
    parser.add_argument("--leave", action="store_true")
    parser.add_argument("--dies", default="")
    options = parser.parse_args()
    if options.deaf:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if options.leave:
        subprocess.Popen([sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)"], start_new_session=True)
    print("[2026-01-01 00:00:00] Ignore import error when loading some.model: failed", flush=True)
    if options.dies:
        raise RuntimeError(options.dies)
    if options.after:
        print("[2026-01-01 00:00:01] Load weight begin. avail mem=1.00 GB", flush=True)
        time.sleep(options.after)
    Answers.workers = options.worker
    start(options.port)
    signal.pause() if not options.deaf else threading.Event().wait()


if __name__ == "__main__":
    main()
