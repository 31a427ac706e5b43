"""transformers' own generate behind the engine's contract: slower, and serves every causal LM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from retrain.engines.capability import base_model, check_request, tolerance_of
from retrain.errors import EngineError
from retrain.protocols import Sampler
from retrain.registry import engine
from retrain.types import Completion, Sampling

if TYPE_CHECKING:
    from torch import Tensor


@engine("transformers")
class GenerateEngine(Sampler):
    """`model.generate` with every sampling field explicit; the model's generation_config never decides.

    Log-probs are those of the processed scores: tempered, and truncated by top_k and top_p. At temperature 0
    tokens are greedy and log-probs those of temperature 1. The global random state is left as it was.

    Args:
        model: any transformers causal LM; its weights are copied, as in the embedded engine.
        max_rows: completions sampled at once.

    Attributes:
        version, tolerance: as in the embedded engine.
    """

    def __init__(self, model: Any, *, max_rows: Annotated[int, Field(gt=0)] = 512) -> None:
        from transformers import GenerationConfig

        from retrain.engines.embedded.general import own_instance

        base = base_model(model)
        self._model = own_instance(base, next(base.parameters()).dtype)
        self._model.generation_config = GenerationConfig()  # fields that are None would be filled from it
        self._max_rows = max_rows
        self.tolerance = tolerance_of(self._model.dtype)
        self.version: int | None = None
        if base is model:
            self.load_weights(model.state_dict(), 0)

    def describe(self) -> str:
        """What samples, in words."""
        return f"transformers engine, generate of {type(self._model).__name__} on {self._model.device}"

    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Copy a full state dict; EngineError, with the old weights still in force, if it does not fit."""
        import torch

        from retrain.engines.embedded.general import copy_weights

        with torch.no_grad():
            copy_weights(self._model, weights)
        self.version = version

    def sample(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[list[Completion]]:
        """`sampling.group_size` completions for each prompt, in the prompts' order."""
        import torch

        from retrain.functional.seeds import derive_seed

        if self.version is None:
            raise EngineError("the sampler has no weights yet: call load_weights first")
        check_request(self._model, prompts, sampling)
        size = max(1, self._max_rows // sampling.group_size)
        device = self._model.device
        results: list[list[Completion]] = []
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.no_grad():
            torch.manual_seed(derive_seed(sampling.seed, "generate"))
            for start in range(0, len(prompts), size):
                results += self._generate(prompts[start : start + size], sampling)
        return results

    def _generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[list[Completion]]:
        import torch

        from retrain.engines.embedded import decode_loop as loop

        ids, pad = loop.left_padded(prompts, self._model.device)
        mask = torch.arange(ids.shape[1], device=ids.device) >= pad[:, None]
        output = self._model.generate(
            input_ids=ids, attention_mask=mask.long(), generation_config=_generation_config(sampling)
        )
        tokens = output.sequences[:, ids.shape[1] :]
        scores = [score.float().log_softmax(-1) for score in output.scores]
        columns = [score.gather(-1, tokens[:, t, None]) for t, score in enumerate(scores)]
        logprobs = torch.cat(columns, -1)
        if sampling.temperature == 0:  # generate has one greedy row per prompt
            tokens, logprobs = (rows.repeat_interleave(sampling.group_size, 0) for rows in (tokens, logprobs))
        return loop.completions(tokens, logprobs, sampling, self.version or 0)


def _generation_config(sampling: Sampling) -> Any:
    from transformers import GenerationConfig

    greedy = sampling.temperature == 0
    drawn = {} if greedy else {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
    return GenerationConfig(
        do_sample=not greedy,
        num_return_sequences=1 if greedy else sampling.group_size,
        max_new_tokens=sampling.max_tokens,
        eos_token_id=list(sampling.stop_ids) or None,
        pad_token_id=0,
        use_cache=True,
        return_dict_in_generate=True,
        output_scores=True,
        **drawn,
    )
