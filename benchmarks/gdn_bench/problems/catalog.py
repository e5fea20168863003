"""Problems by name: `16/32 4x8192`, `16/48 long ladder`.

A name is heads as H/HV, and sequences as NxT or by a name of their own. Sizes are 128 x 128, sequences are
packed, as prompts and documents come; the gates are `mixed`, with states in and out.
"""

from dataclasses import replace

from gdn.testing import cases
from gdn.testing.cases import Case, Lengths, packed

MIXED = Case("mixed", sizes=(128, 128), state="wide")
# one token for each row of an engine's pool, with gates and l2norm in the kernel
STEP = replace(
    MIXED, gate="model", raw_gate="on", beta="sigmoid", use_qk_l2norm_in_kernel=True, has_narrow_gates=True,
    state_v_first=True, heads=(16, 32),
)  # fmt: skip
CHANNELS: dict[str, object] = {"is_per_channel": True, "use_qk_l2norm_in_kernel": True}
# other gates and options that a problem can be timed with, as PASS:NAME
VARIANTS: dict[str, dict[str, object]] = {
    "slow": {"gate": "slow"},
    "none": {"gate": "none"},
    "strong": {"gate": "strong"},
    "l2norm": {"use_qk_l2norm_in_kernel": True},
    "inexact": {"use_qk_l2norm_in_kernel": True, "exact": False},
    # states in an engine's pool, V first, read and updated at an index: `prefill`
    "pool": {"state_v_first": True},
    # a decode whose states are in int16 with scales; the peers' are in bf16
    "int16": {},
    "gated": {"gate": "model", "raw_gate": "on", "beta": "sigmoid", "use_qk_l2norm_in_kernel": True},
    # a decay per key channel, for `prefill` and `train`: between -5 and 0, slow, a rate for each channel
    "kda": {"gate": "bounded", **CHANNELS},
    "kda-slow": {"gate": "slow", **CHANNELS},
    "kda-rates": {"gate": "rates", **CHANNELS},
    # the same as a model's layer has it: raw logits of both gates in bf16, and a lower bound of -5
    "kda-gated": {
        "gate": "bounded",
        "raw_gate": "lower_bound",
        "beta": "sigmoid",
        "has_narrow_gates": True,
        **CHANNELS,
    },
}

# H/HV of the Qwen3.5 family, whole or divided among GPUs, and an HV for every ratio
FAMILY = ("2/8", "4/16", "8/32", "16/64", "16/32", "8/24", "16/48", "16/16")
SEQUENCES = ("1x2048", "1x8192", "1x32768", "4x8192", "8x1024", "8x4096", "16x16384")
LADDERS = {"long ladder": cases.LONG_LADDER, "short ladder": cases.SHORT_LADDER}
# prompts as engines batch them: 1,000 of 1 to 300 tokens; a long one after short ones
BATCHED = {
    "1000 prompts": packed(*(1 + 119 * n % 300 for n in range(1000))),
    "long last": packed(*[512] * 31, 8192),
}
# fewer or shorter prompts: 256 of 1 to 64 tokens, 300 of 1 to 300, 32 of 100 to 2,000
SHORT_PROMPTS = {
    "256 prompts": packed(*(1 + 37 * n % 64 for n in range(256))),
    "300 prompts": packed(*(1 + 119 * n % 300 for n in range(300))),
    "32 prompts": packed(*(100 + 1237 * n % 1901 for n in range(32))),
}
SHORT = ("64x128", "1000 prompts", *SHORT_PROMPTS, "16x64", "128x17", "1x512", "1x256")
# PTO's benchmark: 16 sequences of 16,384 tokens, 262,144 in all, 16 key heads
PTO = "16/16 16x16384"
PTO_GVA = tuple(f"16/{HV} 16x16384" for HV in (16, 32, 48, 64))
BATCHES = (1, 8, 32, 64, 128, 256)  # rows that decode at once
PROMPTS, STEPS = (128, 512, 2048), 128  # tokens read, tokens written
TABLE = (  # the standard problems of prefill
    "2/8 1x32768", "2/8 1x8192", "2/8 8x4096", "16/64 1x32768", "16/64 4x8192", "16/32 1x32768",
    "16/32 1x8192", "16/32 4x8192", "16/32 8x4096", "16/32 8x1024", "16/32 1x2048", PTO,
)  # fmt: skip
TRAIN = ("16/32 1x8192", "16/32 1x32768", "16/32 8x4096")  # the standard problems of train
# those, few and many heads, and sequences short enough that a state's chain is not the limit
TRAINING = (
    *TRAIN, "16/64 4x8192", "16/16 8x4096", "2/8 1x32768", "2/8 8x4096", "4/8 1x8192", "16/32 8x1024",
    "16/32 64x128",
)  # fmt: skip
# one value head per key head, as models with a decay per key channel have them
KDA = ("32/32 1x8192", "64/64 4x4096", "16/16 8x2048", "32/32 long ladder", "32/32 short ladder")
NAMED = LADDERS | BATCHED | SHORT_PROMPTS
SETS: dict[str, tuple[str, ...]] = {
    "table": TABLE,
    "family": tuple(f"{heads} {sequences}" for heads in FAMILY for sequences in ("1x8192", "4x8192")),
    "lengths": tuple(f"16/32 {sequences}" for sequences in SEQUENCES),
    "ladders": tuple(f"{heads} {ladder}" for heads in FAMILY for ladder in LADDERS),
    "batched": tuple(f"16/32 {sequences}" for sequences in ("64x128", *BATCHED)),
    "short": tuple(f"{heads} {sequences}" for sequences in SHORT for heads in ("16/32", "2/8", "16/64")),
    "training": TRAINING,
    "pto": PTO_GVA,
    "kda": KDA,
}
SETS["all"] = tuple(dict.fromkeys(name for names in SETS.values() for name in names))


def heads(name: str) -> tuple[int, int]:
    """Return (H, HV) of a name's first word."""
    H, HV = name.partition(" ")[0].split("/")
    return int(H), int(HV)


def lengths(name: str) -> Lengths:
    """Return the packed sequences of a name's other words: NxT, or a key of NAMED."""
    words = name.partition(" ")[2]
    if words in NAMED:
        return NAMED[words]
    N, T = words.split("x")
    return packed(*[int(T)] * int(N))


def case(name: str) -> Case:
    """Return the problem of a name; ValueError for other texts.

    >>> case("16/32 4x8192").lengths.N
    4
    """
    try:
        return replace(MIXED, heads=heads(name), lengths=lengths(name))
    except ValueError:
        raise ValueError(f"case: expected H/HV and NxT or one of {', '.join(NAMED)}, got {name!r}") from None


def step(B: int, *, tokens: int = 1, state: str = "wide") -> Case:
    """Return a decode of B rows, `tokens` each, on fp32 states (`wide`) or in that of q (`narrow`)."""
    return replace(STEP, lengths=Lengths(tokens, B), state=state)
