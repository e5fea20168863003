"""Test the inversion of a packet's triangular system by substitution: its PTX, and its form without PTX."""

import re

import numpy as np
import pytest
import torch
from conftest import INTERPRETED
from kit import api
from kit.serving import inputs, pool_of, same_bits

packet_solve = pytest.importorskip("gdn.backends.triton.serving.packet_solve")
launch = pytest.importorskip("gdn.backends.triton.launch")
BF16 = torch.bfloat16
LANES = np.arange(32)


def run_text(text, inputs):
    """Run the PTX of one warp; inputs: numbers of the operands after the results, [count, 32] in fp32."""
    count = len(inputs) // 2
    registers = {f"${count + i}": x for i, x in enumerate(inputs)}
    for line in re.sub(r"\.reg [^;]*;", "", text.strip("{}\n ")).split(";"):
        name, *operands = re.split(r"[\s,]+", line.strip()) if line.strip() else ("",)
        value = [registers.get(x, x) for x in operands[1:]]
        if name == "mov.u32":
            registers[operands[0]] = LANES
        elif name == "mov.b32":
            registers[operands[0]] = value[0]
        elif name == "and.b32":
            registers[operands[0]] = value[0] & int(value[1])
        elif name == "add.u32":
            registers[operands[0]] = value[0] + int(value[1])
        elif name == "fma.rn.f32":
            registers[operands[0]] = (value[0] * value[1] + value[2]).astype(np.float32)
        elif name == "shfl.sync.idx.b32":
            segment, lane = int(value[2], 16) >> 8, value[1]
            lane = int(lane) if isinstance(lane, str) else lane
            registers[operands[0]] = value[0][(LANES & segment) | (lane & ~segment & 31)]
        else:
            assert not name, name
    return np.array([registers[f"${i}"] for i in range(count)])


def lanes_of(x, columns):
    """Return the registers of a matrix [16, columns] that an MMA has written, by lanes."""
    rows, pairs = LANES // 4, 2 * (LANES % 4)
    return np.array(
        [
            x[rows + 8 * half, pairs + one + 8 * tile]
            for tile in range(columns // 8) for half in (0, 1) for one in (0, 1)
        ]
    )  # fmt: skip


@pytest.mark.parametrize("count, num_warps", [(4, 1), (8, 1), (16, 1), (4, 2), (8, 2)])
def test_text_solves_system(count, num_warps):
    """Each warp's registers of (I + A)^-1 are those of the inverse in fp64, to fp32's rounding."""
    rng = np.random.default_rng(count)
    A = np.zeros((16, 16), np.float32)
    first = 0 if count == 16 else 8
    A[first : first + count, first : first + count] = np.tril(rng.uniform(-1, 1, (count, count)), -1)
    wanted, eye = np.linalg.inv(np.eye(16) + A), np.eye(16, dtype=np.float32)
    text, width = packet_solve.substitution(count, num_warps), 16 // num_warps
    for warp in range(num_warps):
        own = slice(warp * width, (warp + 1) * width)
        inputs = [lanes_of(x[:, own], width) for x in (-A, eye)]
        got = run_text(text, np.concatenate(inputs))
        np.testing.assert_allclose(got, lanes_of(wanted[:, own], width), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "rows, tokens, dtype, write, places, expected",
    [
        (1, 4, BF16, "none", None, (1, False)),
        (8, 4, BF16, "none", None, (2, True)),
        (8, 16, BF16, "none", None, (1, True)),
        (8, 4, BF16, "final", None, (2, False)),
        (64, 4, BF16, "none", None, (1, False)),
        (8, 4, torch.float32, "none", None, (0, False)),
        (1, 4, BF16, None, 16, (1, False)),
        (8, 4, BF16, None, 16, (2, True)),
        (8, 4, BF16, None, 17, (2, False)),
        (8, 16, BF16, None, 16, (1, False)),
        (64, 4, BF16, None, 16, (1, False)),
        (8, 4, torch.float32, None, 16, (0, False)),
    ],
)
def test_which_programs_wait_for_their_state(rows, tokens, dtype, write, places, expected):
    """All rows substitute on 16-bit operands; programs of one strip of 32 columns use their state late."""
    compiling = pytest.importorskip("kit.compiling")
    H, HV, K = 16, 32, 128
    x = {name: y.expand(rows, *y.shape[1:]) for name, y in inputs(1, tokens, H, HV, K, K, dtype).items()}
    x |= {"read_index": torch.arange(rows), "state": torch.empty(rows, HV, K, K, dtype=dtype)}
    options = {"state_v_first": True, "backend": "triton"}
    with compiling.recording(compiling.TARGETS["cuda:90"].machine) as launches:
        if places is None:
            api.decode(**x, write=write, exact_packet=False, **options)
        else:
            x |= {
                name: torch.empty(rows, places, h, K, dtype=dtype)
                for name, h in (("history_u", HV), ("history_k", H))
            }
            x |= {
                "history_G": torch.empty(rows, places, HV, dtype=torch.float64),
                "cursor": torch.arange(rows),
            }
            api.replay_decode(**x, **options)
    constants = launches[0][0].constants
    assert constants["SUBSTITUTES"] == (constants["SHUFFLES"] > 0)
    assert (constants["SHUFFLES"], constants["READS_PAST" if places else "WAITS"]) == expected


def plain_constants(one, tensors, monkeypatch):
    """Return the constants that a launch has in a traced graph."""
    traced = {}

    class Wrapped:
        def __getitem__(self, grid):
            return lambda *arguments, **constants: traced.update(constants)

    with monkeypatch.context() as patched:
        patched.setattr(torch.library, "wrap_triton", lambda kernel: Wrapped())
        one.trace(tensors)
    return {name: traced[name] for name in one.constants}


def packet_call(device, tokens, write):
    """Return a call of a packet that writes its state or none, and its pool."""
    rows, K, V = (2, 32, 32) if device == "cpu" else (20, 128, 128)
    with torch.device(device):
        x = inputs(rows, tokens, 2, 4, K, V, BF16, raw=True)
        pool = pool_of(rows, HV=4, K=K, V=V, dtype=BF16)
    options = {"write": write, "exact_packet": False, "backend": "triton", "state_v_first": True}
    return lambda state: api.decode(**x, state=state, **options), pool


@pytest.mark.interpret
@pytest.mark.parametrize("tokens, write", [(4, "none"), (4, "final"), (7, "none"), (12, "none")])
def test_a_traced_packet_has_the_bits_of_a_launch(triton_device, monkeypatch, tokens, write):
    """Without PTX the substitution rounds as with it, and no other option of loads changes a bit."""
    call, pool = packet_call(triton_device, tokens, write)
    got = []
    for is_traced in (False, True):
        monkeypatch.setattr(launch.PlanCache, "get", lambda cache, key, make: make())
        state = pool.clone()
        with launch.record_launches([]) as launches:
            o = call(state)
        ((one, tensors),) = launches
        if is_traced:
            one.constants = plain_constants(one, tensors, monkeypatch)
        assert one.constants["SUBSTITUTES"] and (one.constants["SHUFFLES"] == 0) == is_traced
        one(*tensors)
        got.append((o, state))
    assert all(same_bits(a, b) for a, b in zip(*got, strict=True)) and got[0][0].any()


@pytest.mark.skipif(INTERPRETED, reason="expected kernels to be compiled")
def test_a_traced_packet_has_no_assembly(monkeypatch, tmp_path):
    """The tracer must see which tensors a kernel writes: it gives up at inline assembly."""
    import triton
    from kit import compiling

    call, pool = packet_call("cpu", 4, "none")
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    texts = []
    for is_traced in (False, True):
        with compiling.recording(compiling.TARGETS["cuda:90"].machine) as launches:
            call(pool)
        ((one, tensors),) = launches
        if is_traced:
            one.constants, one.options = plain_constants(one, tensors, monkeypatch), {}
        texts.append(compiling._compile(*compiling.jobs_of(launches, "cuda:90")).asm["ttir"])
    assert ["inline_asm" in text for text in texts] == [True, False]


def test_other_layouts_are_seen():
    """The shuffles expect a result of MMAs of m16n8: others are reported, and so are too few columns."""
    from kit.layouts import find_other_layouts

    text = (
        "#blocked = #ttg.blocked<{sizePerThread = [1, 4]}>\n"
        "#mma = #ttg.nvidia_mma<{versionMajor = 2, versionMinor = 0, warpsPerCTA = [1, 2], "
        "instrShape = [16, 8]}>\n"
        '  %1 = tt.elementwise_inline_asm "shfl.sync" {packed_element = 4 : i32} %0 : tensor<16x16xf32, #mma>'
        " -> tensor<16x16xf32, #mma>\n"
    )
    assert find_other_layouts(text) == []
    for a, b in (("-> tensor<16x16xf32, #mma>", "-> tensor<16x16xf32, #blocked>"), ("= 4 :", "= 8 :"),
                 ("[16, 8]", "[16, 256, 16]"), ("-> tensor<16x16", "-> tensor<32x16")):  # fmt: skip
        assert len(find_other_layouts(text.replace(a, b))) == 1, a
