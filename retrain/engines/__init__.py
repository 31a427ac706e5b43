"""Where completions come from: the embedded engine, transformers' generate, and vLLM."""

from retrain.engines.capability import choose_engine as choose_engine
from retrain.engines.capability import unsupported as unsupported
from retrain.engines.generate_engine import GenerateEngine as GenerateEngine
from retrain.engines.torch_engine import TorchEngine as TorchEngine
from retrain.engines.vllm.in_process import VllmEngine as VllmEngine
from retrain.engines.vllm.servers import VllmServerEngine as VllmServerEngine
