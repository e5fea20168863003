"""What the serving tests share: inputs, and comparing what a call wrote with what it should have written."""

import torch

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 2.5e-3, torch.bfloat16: 5e-3}


def inputs(B, T, H=2, HV=4, K=16, V=24, dtype=torch.float32, raw=False):
    """q, k, v and gates of a call, by name."""
    x = {
        "q": torch.randn(B, T, H, K, dtype=dtype),
        "k": torch.randn(B, T, H, K, dtype=dtype),
        "v": torch.randn(B, T, HV, V, dtype=dtype),
    }
    if not raw:
        return x | {
            "g": torch.nn.functional.logsigmoid(torch.randn(B, T, HV)) / 16,
            "beta": torch.rand(B, T, HV),
        }
    gates = {"a": torch.randn(B, T, HV), "b": torch.randn(B, T, HV)}
    return x | gates | {"A_log": torch.randn(HV), "dt_bias": torch.randn(HV)}


def pool_of(*lead, HV=4, K=16, V=24, dtype=torch.float32, v_first=True):
    """States [*lead, HV, V, K], or K first."""
    return torch.randn(*lead, HV, *((V, K) if v_first else (K, V))).to(dtype)


def moved(x, device):
    """Copies on a device of all tensors of a call, each in memory like its own: strides, offset and gaps."""
    return {name: _moved(v, device) if isinstance(v, torch.Tensor) else v for name, v in x.items()}


def _moved(x, device):
    memory = x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)
    return memory.to(device, copy=True).as_strided(x.shape, x.stride(), x.storage_offset())


def error(x, wanted):
    """Relative RMS error; infinite for NaN."""
    if wanted.numel() == 0:
        return 0.0
    x, wanted = x.cpu(), wanted.cpu()
    e = (x.double() - wanted.double()).norm() / wanted.double().norm().clamp(min=1e-30)
    return float("inf") if e.isnan() else float(e)


def same_bits(x, y):
    """Equal to the bit, NaN and signed zero included."""
    as_ints = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    x, y = x.cpu().contiguous(), y.cpu().contiguous()
    return x.dtype == y.dtype and torch.equal(x.view(as_ints), y.view(as_ints))


def stored_wrong(x, wanted, before, tolerance, lead=1):
    """What is wrong with a written tensor: a place that should have been left alone, or a wrong state."""
    x, wanted, before = (t.flatten(0, lead - 1) for t in (x, wanted, before))
    for i in range(x.shape[0]):
        if same_bits(wanted[i], before[i]):
            if not same_bits(x[i], before[i]):
                return f"place {i} was touched"
        elif error(x[i], wanted[i]) > tolerance:
            return f"place {i} is off by {error(x[i], wanted[i]):.1e}"
    return None
