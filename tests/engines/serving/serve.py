"""One vLLM with one exported draft, in a process of its own: answers, counters, and what its
draft model makes of given states. `python -m tests.engines.serving.serve REQUEST.json`."""

import json
import os
import sys
from pathlib import Path


def main(request_path: Path) -> None:
    request = json.loads(request_path.read_text())
    # One process, so that the loaded draft model can be asked directly.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
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
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    counters = {
        metric.name.removeprefix("vllm:spec_decode_num_"): metric.value
        for metric in llm.get_metrics()
        if metric.name.startswith("vllm:spec_decode_num_") and not metric.name.endswith("_per_pos")
    }
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


if __name__ == "__main__":
    main(Path(sys.argv[1]))
