"""Engine that calls transformers' `generate`: slower, but supports every causal LM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from retrain.engines.capability import UNMERGED_OR_MERGED, base_model, check_requests
from retrain.protocols import Sampler, tolerance_of
from retrain.registry import engine
from retrain.system.event_loop import check_stop
from retrain.system.model_paths import positions
from retrain.types import Completion, Request, Sampling

if TYPE_CHECKING:
    from torch import Tensor


@engine("transformers", adapters=UNMERGED_OR_MERGED)
class GenerateEngine(Sampler):
    """Samples with `model.generate`, and draws tokens as the embedded engine does.

    A logits processor draws each token from the request's own random stream, so no global random
    generator is used. The model's generation_config is ignored.

    Args:
        model: any transformers causal LM. The weights of a plain model are copied; an engine of a peft
            model waits for `load_weights`.
        max_rows: largest number of completions in one call of `generate`. A request with more
            completions has a call of its own.

    Attributes:
        version, tolerance: as in the embedded engine.
    """

    def __init__(self, model: Any, *, max_rows: Annotated[int, Field(gt=0)] = 512) -> None:
        from transformers import GenerationConfig

        from retrain.engines.embedded.general import own_instance

        base = base_model(model)
        self._model = own_instance(base, next(base.parameters()).dtype)
        # transformers reads fields that are None in the config given to `generate` from this config of the model.
        self._model.generation_config = GenerationConfig()
        self._max_rows = max_rows
        self.tolerance = tolerance_of(self._model.dtype)
        self.version: int | None = None
        if base is model and not hasattr(next(base.parameters()), "full_tensor"):  # sharded weights arrive one by one
            self.load_weights(model.state_dict(), 0)

    def describe(self) -> str:
        """Describe the engine in one line."""
        return f"transformers engine, generate of {type(self._model).__name__} on {self._model.device}"

    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Copy a full state dict.

        Raises:
            EngineError: names or shapes do not fit the model; the old weights stay in use.
        """
        from retrain.engines.embedded.general import copy_weights

        copy_weights(self._model, weights)
        self.version = version

    def sample(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        """Return the completions of every request, in the order of the requests."""
        fix = "lower [training] max_tokens or drop long prompts"
        check_requests(requests, self.version, positions(self._model), "the model", fix)
        size = max(1, self._max_rows // max((request.count for request in requests), default=1))
        parts = (self._generate(requests[first : first + size], sampling) for first in range(0, len(requests), size))
        return [group for part in parts for group in part]

    def _generate(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        import torch
        from transformers import GenerationConfig

        from retrain.engines.embedded import decoder
        from retrain.functional.draws import draw

        device = self._model.device
        # `generate` shares no prompts, so each completion is a row of its own.
        ids, pad = decoder.left_padded([request.ids for request in requests for _ in range(request.count)], device)
        mask = torch.arange(ids.shape[1], device=device) >= pad[:, None]
        uniform = decoder.uniforms(requests, sampling.seed).to(device)
        chosen = list[Any]()

        def one_token(_: Any, logits: Any) -> Any:
            """Draw a token and record its log-prob; return scores that are finite only for this token."""
            check_stop()
            drawn = draw(logits, uniform[len(chosen)], sampling.temperature, sampling.top_k, sampling.top_p)
            chosen.append(drawn[1])
            # The greedy choice of `generate` is then the token that was drawn.
            return torch.full_like(logits, -torch.inf).scatter(1, drawn[0][:, None], 0.0)

        limits = {"max_new_tokens": len(uniform), "eos_token_id": list(sampling.stop_ids) or None}
        # Any id pads, because completions are cut after their stop id.
        config = GenerationConfig(**limits, do_sample=False, pad_token_id=0, use_cache=True)
        tokens = self._model.generate(
            input_ids=ids, attention_mask=mask.long(), generation_config=config, logits_processor=[one_token]
        )[:, ids.shape[1] :]
        return decoder.completions(tokens, torch.stack(chosen, -1), requests, sampling, self.version or 0)
