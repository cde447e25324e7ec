"""One optimiser step of the EAGLE-3 trainers of speculators 0.9.0 and SpecForge 0.2.0, on the
shapes and data of `train_common`. speculators packs its documents, SpecForge pads them."""

from collections.abc import Callable, Sequence

import torch
from train_common import DECAY, Data, Shape
from transformers import LlamaConfig


def speculators_step(
    shape: Shape, data: Sequence[Data], steps: int, dtype: torch.dtype, device: str
) -> Callable[[int], None]:
    """Compiled with FlexAttention on CUDA, eager on the CPU; its eager KL (the fused one does not
    compile on torch 2.11)."""
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.losses import resolve_loss_config
    from speculators.models.eagle3 import Eagle3SpeculatorConfig
    from speculators.models.eagle3.core import Eagle3DraftModel
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    on_cuda = device == "cuda"
    layer = llama_config(shape)
    layer._attn_implementation = "simple_flex_attention" if on_cuda else "eager"
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=shape.draft_vocab,
        norm_before_residual=False,
        eagle_aux_hidden_state_layer_ids=list(range(1, shape.num_aux + 1)),
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=steps)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
        ),
    )
    with torch.device(device):
        model = Eagle3DraftModel(config)
    model = model.to(device=device, dtype=dtype)
    set_weights(model)
    model.load_vocab_mappings(*vocabulary_maps(shape))
    model = model.to(device)
    optimiser = optimiser_of(model)
    loss = resolve_loss_config("kl_div", "eager")
    batches = [
        {
            "hidden_states": one.hidden[None],
            "input_ids": one.ids[None].to(device),
            "document_ids": one.document[None].to(device),
            "loss_mask": one.mask[None].to(device),
            "position_ids": one.position[None].to(device),
            "verifier_last_hidden_states": one.last[None],
            "ttt_steps": steps,
            "ttt_step_loss_decay": DECAY,
            "loss_config": loss,
        }
        for one in data
    ]

    def run(i: int) -> None:
        model(**batches[i % len(batches)])[1].backward()
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)

    return run


def specforge_step(
    shape: Shape, data: Sequence[Data], steps: int, dtype: torch.dtype, device: str
) -> Callable[[int], None]:
    """With FlexAttention and its compact teacher; all documents of a batch have one length."""
    from specforge.algorithms.eagle3.model import OnlineEagle3Model
    from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3

    config = llama_config(shape, draft_vocab_size=shape.draft_vocab)
    config.target_hidden_size, config.pad_token_id = shape.hidden, 0
    draft = LlamaForCausalLMEagle3(config, attention_backend="flex_attention")
    draft = draft.to(device=device, dtype=dtype)
    draft.t2d.copy_(vocabulary_maps(shape)[0])
    model = OnlineEagle3Model(draft, length=steps, attention_backend="flex_attention")
    optimiser = optimiser_of(draft)
    head = torch.randn(shape.vocab, shape.hidden, device=device).to(dtype) * 0.02
    batches = []
    for one in data:
        size = (len(one.lengths), one.lengths[0])
        batches.append(
            {
                "input_ids": one.ids.to(device).view(size),
                "attention_mask": torch.ones(size, device=device, dtype=torch.long),
                "target": None,
                "loss_mask": one.mask.to(device).view(*size, 1).float(),
                "hidden_states": one.hidden.view(*size, -1),
                "target_hidden_for_compact": one.last.view(*size, -1),
                "target_head_weight": head,
            }
        )

    def run(i: int) -> None:
        losses = model(**batches[i % len(batches)])[0]
        sum(DECAY**j * loss for j, loss in enumerate(losses)).backward()
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)

    return run


def llama_config(shape: Shape, **more: int) -> LlamaConfig:
    config = LlamaConfig(
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        vocab_size=shape.vocab,
        num_hidden_layers=1,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        **more,
    )
    config.architectures = ["LlamaForCausalLM"]
    return config


def vocabulary_maps(shape: Shape) -> tuple[torch.Tensor, torch.Tensor]:
    """t2d and d2t of a draft vocabulary of the lowest ids."""
    t2d = torch.zeros(shape.vocab, dtype=torch.bool)
    t2d[: shape.draft_vocab] = True
    return t2d, torch.zeros(shape.draft_vocab, dtype=torch.long)


def set_weights(model: torch.nn.Module) -> None:
    """Random values where the peer leaves memory as it finds it (it would load them later)."""
    for weight in model.parameters():
        if weight.ndim > 1:
            weight.data.normal_(0, 0.02)
        elif not weight.isfinite().all() or weight.abs().max() > 1e3:
            weight.data.fill_(1.0)


def optimiser_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    weights = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(weights, lr=1e-4, fused=True)
