"""vLLM with one exported draft after the other, in a process of its own that starts once: answers,
counters, and what its draft model makes of given states.
`python -m tests.engines.serving.serve REQUEST.json...`."""

import json
import os
import sys
from pathlib import Path
from typing import Any

from paceline.vllm_process import free_memory


def main(request_paths: list[Path]) -> None:
    # One process, so that the loaded draft model can be asked directly.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    for path in request_paths:
        serve(json.loads(path.read_text()))


def serve(request: dict[str, Any]) -> None:
    import torch
    from safetensors.torch import load_file, save_file
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=request["target"],
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        block_size=32,
        disable_log_stats=False,
        speculative_config={
            "method": "eagle3",
            "model": request["draft"],
            "num_speculative_tokens": request["num_draft_tokens"],
        },
    )
    prompts = [{"prompt_token_ids": ids} for ids in request["prompts"]]
    sampling = [
        SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True)
        for n in request["max_tokens"]
    ]
    before = counters_of(llm)
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    counters = {name: value - before[name] for name, value in counters_of(llm).items()}
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    drafter = runner.drafter.model
    states = load_file(request["states"])
    with torch.inference_mode():
        fused = drafter.combine_hidden_states(states["aux"].flatten(1))
        logits = drafter.compute_logits(states["normed"])
    save_file({"fused": fused.clone(), "logits": logits.clone()}, request["answers"] + ".st")
    answer = {
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "counters": counters,
        "layers": list(runner.model.model.aux_hidden_state_layers),
    }
    Path(request["answers"]).write_text(json.dumps(answer))
    llm.llm_engine.engine_core.shutdown()
    free_memory()


def counters_of(llm: Any) -> dict[str, int]:
    """vLLM's counters of drafts, cumulative."""
    prefix = "vllm:spec_decode_num_"
    return {
        metric.name.removeprefix(prefix): metric.value
        for metric in llm.get_metrics()
        if metric.name.startswith(prefix) and not metric.name.endswith("_per_pos")
    }


if __name__ == "__main__":
    main([Path(name) for name in sys.argv[1:]])
