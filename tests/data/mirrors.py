"""A web server on this machine whose mirrors misbehave, each in its own way, by the first part of the path."""

import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    """/good/ serves · /wrong/ other bytes · /cut/ half of them · /missing/ 404 · /gone/ 404 after a good probe ·
    /mute/ never answers · /deaf/ answers the probe, then not a byte · /stall/ half, then not a byte · /slow/ in drops
    """

    def do_HEAD(self):
        mirror, content = self.look_up()
        if mirror == "mute":
            self.server.released.wait()
        self.start(404 if mirror == "missing" else 200, content)

    def do_GET(self):
        mirror, content = self.look_up()
        self.server.asked.append(self.path)
        half = len(content) // 2
        if mirror == "deaf":
            self.server.released.wait()
        self.start(404 if mirror in ("missing", "gone") else 200, content)
        if mirror == "good":
            self.wfile.write(content)
        elif mirror == "wrong":
            self.wfile.write(bytes(len(content)))
        elif mirror in ("cut", "stall"):
            self.wfile.write(content[:half])
            self.wfile.flush()
            if mirror == "stall":
                self.server.released.wait()
        elif mirror == "slow":
            for i in range(0, len(content), 1 + len(content) // 10):
                self.wfile.write(content[i:i + 1 + len(content) // 10])
                self.wfile.flush()
                self.server.released.wait(0.1)

    def look_up(self):
        _, mirror, name = self.path.split("/")
        return mirror, self.server.contents[name]

    def start(self, status, content):
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()

    def log_message(self, *arguments):
        pass


@contextmanager
def serving(contents):
    """Yield url(mirror); the function's `asked` lists the paths that were fetched. `contents` {name: bytes}."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads, server.block_on_close = True, False
    server.contents, server.asked, server.released = contents, [], threading.Event()
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()

    def url(mirror):
        return f"http://127.0.0.1:{server.server_port}/{mirror}/"

    url.asked = server.asked
    try:
        yield url
    finally:
        server.released.set()
        server.shutdown()
        server.server_close()
