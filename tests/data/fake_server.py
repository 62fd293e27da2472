"""A tiny OpenAI-style server that misbehaves on demand; started by tests as an arm's command."""

import argparse
import ctypes
import json
import os
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--port", type=int)
parser.add_argument("--host", default="127.0.0.1")
parser.add_argument("--die-loading", action="store_true")
parser.add_argument("--never-listen", action="store_true")
parser.add_argument("--health-only", action="store_true", help="answers /health, and 503 to every generation")
parser.add_argument("--hang", action="store_true", help="takes a generation request and never answers")
parser.add_argument("--die-at-request", type=int)
parser.add_argument("--hoard-loading", action="store_true", help="takes memory without end")
parser.add_argument("--hoard-at-request", type=int)
parser.add_argument("--stubborn", action="store_true", help="ignores SIGINT and SIGTERM")
parser.add_argument("--escape", type=Path, help="fork twice into a new session; write the worker's pid here")
parser.add_argument("--worker", type=Path, help="fork one that ends soon after us; write its pid here")
parser.add_argument("--linger", type=float, help="on SIGINT the first thread ends at once, another so much later")
options = parser.parse_args()


def hoard():
    """Take memory until there is none."""
    taken = []
    while True:
        taken.append(b"x" * 2**22)


print("loading weights", flush=True)
if options.hoard_loading:
    hoard()
if options.die_loading:
    sys.exit("cannot find tensor lm_head.weight")
if options.stubborn:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if options.linger:

    def last_thread():
        time.sleep(options.linger)
        os._exit(0)

    def end_first_thread(*_):
        threading.Thread(target=last_thread).start()
        ctypes.CDLL(None).pthread_exit(None)

    signal.signal(signal.SIGINT, end_first_thread)
if options.escape and os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        options.escape.write_text(str(os.getpid()))
        time.sleep(600)
    os._exit(0)
if options.worker and os.fork() == 0:
    options.worker.write_text(str(os.getpid()))
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(0.05)
    time.sleep(0.4)
    os._exit(0)
if options.never_listen:
    time.sleep(600)


class Handler(BaseHTTPRequestHandler):
    """Answers "ok" to every chat."""

    protocol_version = "HTTP/1.1"
    requests = 0

    def do_GET(self):
        self.answer(200, {"status": "ok", "version": "9.9"})

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        Handler.requests += 1
        if options.die_at_request and Handler.requests >= options.die_at_request:
            print("out of memory", flush=True)
            os._exit(7)
        if options.hoard_at_request and Handler.requests >= options.hoard_at_request:
            hoard()
        if options.hang:
            time.sleep(600)
        if options.health_only:
            return self.answer(503, {"error": {"message": "the model is not loaded"}})
        message = {"role": "assistant", "content": "ok"}
        choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}
        usage = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
        return self.answer(200, {"object": "chat.completion", "choices": [choice], "usage": usage})

    def answer(self, code, body):
        data = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


ThreadingHTTPServer.daemon_threads = True
ThreadingHTTPServer((options.host, options.port), Handler).serve_forever()
