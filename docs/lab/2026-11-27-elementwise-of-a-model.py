"""Count the bytes that the operators of a model's training step read and write, by module, without computing.

    PYTHONPATH=src:benchmarks python docs/lab/2026-11-27-elementwise-of-a-model.py

The model and the step are those of `gdn bench model`, patched with gdn, in fake tensors on a CPU: there the
gated norm is the class's own. An operator moves each input once (an expanded one as it lies in memory) and
each output once. A forward operator belongs to the innermost module whose forward runs, a backward one to the
module that made its autograd node; sums of gradients belong to the node that was run before them.
"""

from collections import defaultdict

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import gdn
from gdn_bench.passes.end_to_end import build
from gdn_bench.passes.model import MODEL, TOKENS

SPEED = 4.0e12  # bytes a second of an H200's HBM
# no elementwise kernels, or nothing moved
OTHERS = (
    "mm",
    "attention",
    "softmax",
    "nll_loss",
    "embedding",
    "gdn.",
    "empty",
    "detach",
    "_unsafe_view",
    "prim.",
)


def size(x):
    """Return the bytes of a tensor's elements in memory; axes of stride 0 count once."""
    count = 1
    for n, stride in zip(x.shape, x.stride(), strict=True):
        count *= 1 if stride == 0 else n
    return count * x.element_size()


class Counter(TorchDispatchMode):
    """Add up the bytes of operators by (module, is_backward, operator)."""

    def __init__(self, model):
        super().__init__()
        self.bytes, self.modules = defaultdict(int), ["model"]
        for name, module in model.named_modules():
            label = type(module).__name__ + (", of heads" if name.endswith(("q_norm", "k_norm")) else "")
            module.register_forward_pre_hook(self.enter(label), with_kwargs=True)
            module.register_forward_hook(self.leave)

    def enter(self, label):
        def hook(module, args, kwargs):
            self.mark((args, kwargs))
            self.modules.append(label)

        return hook

    def leave(self, module, args, output):
        self.mark(output)
        self.modules.pop()

    def mark(self, values):
        """Give the unmarked autograd nodes behind the values to the module that runs now."""
        pending = [x.grad_fn for x in tree_leaves(values) if isinstance(x, torch.Tensor)]
        while pending:
            node = pending.pop()
            if node is not None and "module" not in node.metadata:
                node.metadata["module"] = self.modules[-1]
                pending.extend(parent for parent, _ in node.next_functions)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output, name = function(*args, **(kwargs or {})), str(function)
        aliases = [a.alias_info for a in function._schema.arguments if a.alias_info is not None]
        is_view = any(not alias.is_write for alias in aliases)
        if not is_view and not any(part in name for part in OTHERS):
            node = torch._C._current_autograd_node()
            module = self.modules[-1] if node is None else node.metadata.get("module", "model")
            tensors = [x for x in tree_leaves((args, kwargs, output)) if isinstance(x, torch.Tensor)]
            self.bytes[module, node is not None, name] += sum(size(x) for x in tensors)
        return output


def without_storage(model):
    """Put fake tensors of the CPU in the place of meta tensors."""
    for module in model.modules():
        for name, x in module._parameters.items():
            if x is not None:
                module._parameters[name] = nn.Parameter(torch.empty_like(x, device="cpu"))
        for name, x in module._buffers.items():
            module._buffers[name] = torch.empty_like(x, device="cpu")
    return model


def main():
    model = build(MODEL, torch.device("meta"), torch.bfloat16).train()
    with FakeTensorMode(allow_non_fake_inputs=True), gdn.patch_transformers():
        model, tokens = without_storage(model), torch.zeros(1, TOKENS, dtype=torch.long)
        with Counter(model) as counter:
            model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    total, modules = sum(counter.bytes.values()), defaultdict(lambda: [0, 0])
    for (module, is_backward, _), count in counter.bytes.items():
        modules[module][is_backward] += count
    print(f"{total / 1e9:.1f} GB, {1e3 * total / SPEED:.1f} ms: module, GB forward, GB backward, ms, share")
    for module, counts in sorted(modules.items(), key=lambda x: -sum(x[1])):
        both, columns = sum(counts), " ".join(f"{x / 1e9:7.2f}" for x in counts)
        print(f"{module:28} {columns} {1e3 * both / SPEED:7.2f} {both / total:7.3f}")
    for (module, is_backward, name), count in sorted(counter.bytes.items(), key=lambda x: -x[1])[:30]:
        print(f"{count / 1e9:7.2f} GB  {module} {'backward' if is_backward else 'forward'} {name}")


if __name__ == "__main__":
    main()
