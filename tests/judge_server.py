"""An OpenAI-compatible endpoint that answers by plan."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Server(ThreadingHTTPServer):
    """A judge. `plan` maps words of the question to the statuses and answers it gives in turn, or is a function of the
    question."""

    def __init__(self, plan):
        self.plan, self.seen, self.keys = plan, [], set()
        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}/v1"

    @property
    def questions(self):
        return [body["messages"][0]["content"] for body in self.seen]

    def said(self, question):
        if callable(self.plan):
            return self.plan(question)
        answers = next(answers for word, answers in self.plan.items() if word in question)
        return answers.pop(0) if len(answers) > 1 else answers[0]


class Handler(BaseHTTPRequestHandler):
    server: Any

    def log_message(self, *args):
        pass

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append(body)
        self.server.keys.add(self.headers["Authorization"])
        said = self.server.said(body["messages"][0]["content"])
        if isinstance(said, int):
            self.send_error(said)
            return
        data = json.dumps({"choices": [{"message": {"content": said}}]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
