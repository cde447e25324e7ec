"""Norms' gains multiplied into the weights that read the normed rows. Legend: O outputs of all
weights, I inputs."""

from collections.abc import Sequence

import torch


def with_gains(
    weights_OI: Sequence[torch.Tensor], gains_I: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """The weights one below the other, cut into a block of columns for each gain and multiplied by
    it: [O, I of the gain] each."""
    return _WithGains.apply(len(gains_I), *gains_I, *weights_OI)


class _WithGains(torch.autograd.Function):
    """Autograd's own backward pass would pad the gradient of each block to the whole weight."""

    @staticmethod
    def forward(ctx, num_gains, *tensors):
        gains, weights = tensors[:num_gains], tensors[num_gains:]
        joint = torch.cat(weights)
        ctx.sizes = [len(w) for w in weights]
        ctx.save_for_backward(joint, *gains)
        blocks = joint.split([len(gain) for gain in gains], 1)
        return tuple(block * gain for block, gain in zip(blocks, gains, strict=True))

    @staticmethod
    def backward(ctx, *grads):
        joint, *gains = ctx.saved_tensors
        widths = [len(gain) for gain in gains]
        grad_joint = torch.empty_like(joint)
        grad_gains = []
        blocks = zip(joint.split(widths, 1), grad_joint.split(widths, 1), strict=True)
        for grad, gain, (block, grad_block) in zip(grads, gains, blocks, strict=True):
            torch.mul(grad, gain, out=grad_block)
            grad_gains.append((grad * block).sum(0))
        return None, *grad_gains, *grad_joint.split(ctx.sizes)
