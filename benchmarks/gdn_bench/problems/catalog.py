"""Problems by name, as data: what tests, accuracy and speed mean by `16/32 4x8192` or `16/48 long ladder`.

A name is heads as H/HV, and sequences as NxT or by a name of theirs. Sizes are 128 x 128 and sequences
always packed, as prompts and documents come; the gates are `mixed`, with states in and out.
"""

from dataclasses import replace

from gdn.testing import cases
from gdn.testing.cases import Case, Lengths, packed

MIXED = Case("mixed", sizes=(128, 128), state="wide")
# a token for each row of an engine's pool, everything inside the call
STEP = replace(
    MIXED, gate="model", raw_gate="on", beta="sigmoid", use_qk_l2norm_in_kernel=True, has_narrow_gates=True,
    state_v_first=True, heads=(16, 32),
)  # fmt: skip
# what else a problem can be timed on, as PASS:NAME: other gates, options in the kernels
VARIANTS: dict[str, dict[str, object]] = {
    "slow": {"gate": "slow"},
    "none": {"gate": "none"},
    "strong": {"gate": "strong"},
    "l2norm": {"use_qk_l2norm_in_kernel": True},
    "inexact": {"use_qk_l2norm_in_kernel": True, "exact": False},
    "gated": {"gate": "model", "raw_gate": "on", "beta": "sigmoid", "use_qk_l2norm_in_kernel": True},
}

# H/HV of the Qwen3.5 family, whole or divided among GPUs, and an HV for every ratio
FAMILY = ("2/8", "4/16", "8/32", "16/64", "16/32", "8/24", "16/48", "16/16")
SEQUENCES = ("1x2048", "1x8192", "1x32768", "4x8192", "8x1024", "8x4096", "16x16384")
LADDERS = {"long ladder": cases.LONG_LADDER, "short ladder": cases.SHORT_LADDER}
# as engines batch prompts: 1,000 of 1 to 300 tokens, and a long one behind short ones
BATCHED = {
    "1000 prompts": packed(*(1 + 119 * n % 300 for n in range(1000))),
    "long last": packed(*[512] * 31, 8192),
}
# PTO's benchmark: 16 sequences of 16,384 tokens, 262,144 in all, 16 key heads
PTO = "16/16 16x16384"
PTO_GVA = tuple(f"16/{HV} 16x16384" for HV in (16, 32, 48, 64))
# PTO's end-to-end accuracy: lengths of the packed sequences
PTO_LENGTHS: tuple[Lengths, ...] = (
    *(packed(T) for T in (128, 256, 512, 1024, 2048, 4096)),
    packed(256, 256),
    packed(128, 128, 128),
    packed(384),
    packed(150, 300),
    packed(129, 255),
    packed(1, 17, 128, 129, 255),
    cases.SHORT_LADDER,
    packed(128, 256, 384, 512, 768),
    cases.LONG_LADDER,
)
BATCHES = (1, 8, 32, 64, 128, 256)  # rows that decode at once
PROMPTS, STEPS = (128, 512, 2048), 128  # tokens read, tokens written
TABLE = (  # the rows that goals are set for
    "2/8 1x32768", "2/8 1x8192", "2/8 8x4096", "16/64 1x32768", "16/64 4x8192", "16/32 1x32768",
    "16/32 1x8192", "16/32 4x8192", "16/32 8x4096", "16/32 8x1024", "16/32 1x2048", PTO,
)  # fmt: skip
NAMED = LADDERS | BATCHED
SETS: dict[str, tuple[str, ...]] = {
    "table": TABLE,
    "family": tuple(f"{heads} {sequences}" for heads in FAMILY for sequences in ("1x8192", "4x8192")),
    "lengths": tuple(f"16/32 {sequences}" for sequences in SEQUENCES),
    "ladders": tuple(f"{heads} {ladder}" for heads in FAMILY for ladder in LADDERS),
    "batched": tuple(f"16/32 {sequences}" for sequences in ("64x128", *BATCHED)),
    "pto": PTO_GVA,
}
SETS["all"] = tuple(dict.fromkeys(name for names in SETS.values() for name in names))


def heads(name: str) -> tuple[int, int]:
    """(H, HV) of a name's first word."""
    H, HV = name.partition(" ")[0].split("/")
    return int(H), int(HV)


def lengths(name: str) -> Lengths:
    """The packed sequences of a name's other words: NxT, or what has a name."""
    words = name.partition(" ")[2]
    if words in NAMED:
        return NAMED[words]
    N, T = words.split("x")
    return packed(*[int(T)] * int(N))


def case(name: str) -> Case:
    """The problem of a name. ValueError for what is not one.

    >>> case("16/32 4x8192").lengths.N
    4
    """
    try:
        return replace(MIXED, heads=heads(name), lengths=lengths(name))
    except ValueError:
        raise ValueError(f"case: expected H/HV and NxT or one of {', '.join(NAMED)}, got {name!r}") from None


def step(B: int, *, tokens: int = 1, state: str = "wide") -> Case:
    """A decode of B rows, `tokens` each, on states in fp32 (`wide`) or in the dtype of q (`narrow`)."""
    return replace(STEP, lengths=Lengths(tokens, B), state=state)
