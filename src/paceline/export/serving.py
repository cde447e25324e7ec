"""The commands that serve an exported draft."""

import json
import shlex
from pathlib import Path

from paceline.forms.names import SGLANG
from paceline.target.spec import Target, TargetReference


def served_name(target: Target) -> str:
    """What a server is told to load: a Hub id as it is, else the local folder."""
    return target.reference.target if is_hub_id(target.reference) else str(target.folder)


def is_hub_id(reference: TargetReference) -> bool:
    name = reference.target
    return not name.startswith("pkg:") and not Path(name).expanduser().exists()


def serving_command(target: Target, folder: Path, form: str, num_speculative_tokens: int) -> str:
    """The shell command that serves `target` with the draft in `folder`, drafting a chain.

    SGLang counts the token that the target adds: its number of draft tokens is K + 1.
    """
    reference = target.reference
    hub = ["--revision", reference.revision] if reference.revision else []
    hub += ["--trust-remote-code"] if reference.trust_remote_code else []
    if form == SGLANG:
        words = [
            *("python", "-m", "sglang.launch_server"),
            *("--model-path", served_name(target)),
            *("--speculative-algorithm", "EAGLE3"),
            *("--speculative-draft-model-path", str(folder)),
            *("--speculative-num-steps", str(num_speculative_tokens)),
            *("--speculative-eagle-topk", "1"),
            *("--speculative-num-draft-tokens", str(num_speculative_tokens + 1)),
        ]
    else:
        speculative = {
            "method": "eagle3",
            "model": str(folder),
            "num_speculative_tokens": num_speculative_tokens,
        }
        words = ["vllm", "serve", served_name(target)]
        words += ["--speculative-config", json.dumps(speculative)]
    return shlex.join([*words, *hub])
