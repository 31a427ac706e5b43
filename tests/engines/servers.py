"""Servers that speak as much of vLLM's HTTP as the client asks for, and can be made to fail."""

import json
import math
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from safetensors import safe_open

TRANSFER = {
    "/init_weight_transfer_engine": (("",), "ready"),
    "/start_weight_update": (("", "ready"), "open"),
    "/update_weights": (("open",), None),
    "/finish_weight_update": (("open",), "ready"),
    "/shutdown_weight_transfer_engine": (("", "ready"), ""),
}
"""Steps of vLLM's own transfer: when each is allowed, and what follows."""


class Handler(BaseHTTPRequestHandler):
    """HTTP for a server, its `owner`."""

    owner: Any

    def log_message(self, *args):
        pass

    def do_GET(self):
        path = self.path.partition("?")[0]
        self.owner.keys.add(self.headers["Authorization"])
        self.owner.greeted += path == "/version"
        self.owner.hook(path)
        answers = {
            "/version": {"version": self.owner.version},
            "/health": {},
            "/weight_info": {"weight_version": self.owner.label},
            "/get_world_size": {"world_size": 1},
            "/server_info": {"vllm_config": self.owner.config},
        }
        if path not in answers or (path == "/weight_info" and not self.owner.dev):
            self.send_error(404)
        else:
            self.answer(answers[path])

    def do_POST(self):
        self.owner.keys.add(self.headers["Authorization"])
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.owner.paths.append(self.path)
        reply = self.owner.reply(self.path.partition("?")[0], body)
        if reply is None:
            self.close_connection = True
        elif isinstance(reply, int):
            self.send_error(reply)
        else:
            self.answer(reply)

    def answer(self, reply):
        data = (reply if isinstance(reply, str) else json.dumps(reply)).encode()
        slow = self.owner.fault == "trickle" and self.path.endswith("generate")
        self.send_response(200)
        self.send_header("Content-Type", "text/plain" if isinstance(reply, str) else "application/json")
        self.send_header("Content-Length", str(len(data) + 1000 * slow))
        self.end_headers()
        for _ in range(1000 * slow):
            self.wfile.write(b" ")
            time.sleep(0.05)
        self.wfile.write(data)


def number(value):
    """Damage: the last log-prob is this."""
    return lambda choice: choice["logprobs"]["content"][-1].update(logprob=value)


def token(value):
    """Damage: the last token id is this."""

    def change(choice):
        choice["token_ids"] = [*choice["token_ids"][:-1], value]
        choice["logprobs"]["content"][-1]["token_id"] = value

    return change


def spans(*ends):
    """Damage: the weights of its tokens change at these ends."""

    def change(choice):
        [whole] = choice["weight_versions"]
        starts = [0, *ends[:-1]]
        choice["weight_versions"] = [whole | {"start": a, "end": b} for a, b in zip(starts, ends, strict=True)]

    return change


DAMAGE = {
    **{"nan": number(math.nan), "infinite": number(-math.inf), "bignum": number(10**400), "no number": number("low")},
    **{"large id": token(1 << 31), "negative id": token(-1), "fraction id": token(5.0), "text id": token("5")},
    **{"gap": spans(1), "overlap": spans(2, 1, 3), "endless": spans(10**12, 3), "text span": spans("1", 3)},
}
"""Faults in one choice of an answer, by name."""


class Server:
    """The endpoints of vLLM that the client asks, as they answer, with a fault that can be switched on.

    Attributes:
        fault: what it does wrong; "" for nothing.
        hook: called with the path of every request, before it is answered.
        seen: paths that were asked, in order.
        keys: values of the header Authorization.
        greeted: how often its version was asked for.
        asked, loaded: completions and weights that it was asked for.
        config: what it says that it was started with.
        update: "" without a connection to the trainer, else "ready", or "open" within an update.
        names: of the weights that it has been given, by file or transfer.
        adapter: folder of the adapter that it has loaded.
    """

    def __init__(self, port=0):
        self.config = {
            "weight_transfer_config": None,
            "lora_config": None,
            "model_config": {"max_model_len": 1024, "model": "some/model"},
        }
        self.update, self.names, self.adapter = "", set(), ""
        self.fault, self.label, self.version, self.asked, self.loaded, self.dev = "", "default", "0.32.0", 0, 0, True
        self.keys, self.greeted, self.paths = set(), 0, []
        self.middle, self.sampling, self.resumed = lambda: None, threading.Lock(), threading.Event()
        self.resumed.set()
        self.http, self.seen, self.hook, self.paused = None, [], lambda path: None, False
        self.start(port)

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def start(self, port=None):
        port = self.port if port is None else port
        self.http = ThreadingHTTPServer(("127.0.0.1", port), type("Bound", (Handler,), {"owner": self}))
        self.http.daemon_threads = True
        self.port = self.http.server_port
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    def kill(self):
        self.http.shutdown()
        self.http.server_close()
        self.label, self.update, self.adapter, self.names = "default", "", "", set()

    def reply(self, path, body):
        """JSON, a status, or None to hang up."""
        self.hook(path)
        self.seen.append(path)
        if path == self.fault:
            return 500
        if path == "/inference/v1/generate":
            return self.complete(body)
        if path in ("/pause", "/resume"):
            self.hold(path)
        if path in TRANSFER:
            return self.transfer(path, body)
        if path == "/v1/load_lora_adapter":
            self.adapter = body["lora_path"]
            return "Success" if self.config["lora_config"] and self.names and body["load_inplace"] else 404
        if path == "/collective_rpc":
            self.load(body["kwargs"]["weights_path"])
        if path == "/update_weight_version":
            self.label = body["new_version"]
        return {"success": self.fault != "cached"}

    def hold(self, path):
        """Pause or resume; a pause that keeps requests waits until what is being sampled has come to its middle."""
        self.paused = path == "/pause"
        if path == "/resume":
            self.resumed.set()
        elif "mode=keep" in self.paths[-1]:
            self.resumed.clear()
            with self.sampling:
                pass

    def complete(self, body):
        """Completions, once it is not paused; a pause that keeps no requests refuses them."""
        self.asked += 1
        if self.paused and self.resumed.is_set():
            return 503
        self.resumed.wait()
        with self.sampling:
            return self.generate(body) if "model" not in body or self.adapter else 404

    def transfer(self, path, body):
        """vLLM's own transfer of weights, up to what is done with them."""
        allowed, following = TRANSFER[path]
        if self.update not in allowed or not self.config["weight_transfer_config"]:
            return 500
        if path == "/update_weights":
            self.names, self.loaded = set(body["update_info"]["names"]), self.loaded + 1
        self.update = self.update if following is None else following
        return {}

    def load(self, folder):
        """Read what the trainer wrote."""
        self.loaded += 1
        with safe_open(f"{folder}/model.safetensors", "np") as file:
            self.names = set(file.keys())

    def sample(self, prompt, fields):
        """(ids, log-probs, finish_reason) of every completion: the prompt's first token over and over."""
        length = fields["max_tokens"]
        return [(prompt[:1] * length, [-0.5] * length, "length")] * fields["n"]

    def generate(self, body):
        """An answer, or one with the fault that is switched on."""
        if self.fault == "hang":
            threading.Event().wait()
        if self.fault in ("drop", "refuse"):
            return None if self.fault == "drop" else 400
        label = "older" if self.fault == "stale" else self.label
        self.sampling.release()
        self.middle()  # weights may be loaded while it samples
        self.sampling.acquire()
        later = self.label
        choices = []
        for ids, logprobs, reason in self.sample(body["token_ids"], body["sampling_params"]):
            if self.fault in ("brief", "long"):
                ids, logprobs = (ids[:-1], logprobs[:-1]) if self.fault == "brief" else (ids * 2, logprobs * 2)
            content = [{"token_id": i, "logprob": p} for i, p in zip(ids, logprobs, strict=True)]
            choice = {"token_ids": ids[self.fault == "short" :], "logprobs": {"content": content}}
            versions = [{"version": label, "start": 0, "end": len(ids)}]
            if later != label and self.fault != "stale":
                versions = [{"version": label, "start": 0, "end": 1}, {"version": later, "start": 1, "end": len(ids)}]
            if self.fault == "mixed":
                versions.append({"version": "older", "start": 1, "end": 2})
            choice |= {"finish_reason": reason, "weight_versions": versions}
            DAMAGE.get(self.fault, lambda _: None)(choice)
            choices.append(choice)
        return {"choices": choices[self.fault == "few" :]}


class ModelServer(Server):
    """A server that does sample, from the weights it has loaded."""

    model = None
    lock = threading.Lock()

    def load(self, folder):
        from safetensors.torch import load_file
        from transformers import AutoConfig, AutoModelForCausalLM

        super().load(folder)
        # Not from_pretrained: the trainer lives in this process, and its next model would be initialized otherwise.
        self.model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).eval()
        self.model.load_state_dict(load_file(f"{folder}/model.safetensors"))

    def sample(self, prompt, fields):
        from retrain.engines.torch_engine import TorchEngine
        from retrain.types import Request, Sampling

        request = Request(tuple(prompt), fields["n"], fields["max_tokens"], stream=0)
        sampling = Sampling(
            temperature=fields["temperature"], stop_ids=tuple(fields["stop_token_ids"]), seed=fields["seed"]
        )
        with self.lock:
            [rows] = TorchEngine(self.model, dtype="float32").sample([request], sampling)
        return [(list(row.ids), list(row.logprobs), row.finish_reason) for row in rows]


if __name__ == "__main__":
    print(Server().port, flush=True)
    threading.Event().wait()
