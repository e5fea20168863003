"""Run the Hopper kernel of one token on a history under compute-sanitizer, and 200 times with equal bits.

    PYTHONPATH=src python docs/lab/2026-11-28-history-sanitizer.py problems      (compiles)
    PYTHONPATH=src compute-sanitizer --tool racecheck --print-limit 9999 python ... problems
    PYTHONPATH=src python docs/lab/2026-11-28-history-sanitizer.py reruns [COUNT]
    PYTHONPATH=src compute-sanitizer --tool racecheck --print-limit 9999 python ... control [1]

problems: 48 rows of 32 value heads, so that a CTA takes several rows and heads, three steps; some rows have
no slot, cursors are such that rows fold in each step. States in fp32 and bf16. `count` of
2026-11-27-training-sanitizer.py prints the races of a log by kernel and pair of lines.
control: a kernel of 30 lines with the protocol alone: two warps copy tiles by cp.async, 16 bytes a lane,
whose arrival an mbarrier counts; four warps wait, read, meet at a barrier, and one of them arrives for all.
What racecheck reports of it, it reports of any such kernel. `control 1`: the readers wait after they have
read, a race.
"""

import sys

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

import gdn
from gdn.backends.hopper.gluon import (
    barrier,
    cp_async,
    cp_async_arrive,
    cp_async_commit,
    cp_async_wait,
    mbarrier,
)
from gdn.backends.triton import launch

ROWS, H, HV, D, PLACES, STEPS = 48, 16, 32, 128, 16, 3
FORMS = (torch.float32, torch.bfloat16)
STAGES, ROWS_OF_TILE, COLUMNS = gl.constexpr(2), gl.constexpr(128), gl.constexpr(128)
TILE = gl.constexpr(128 * 128)  # floats
LANES = gl.constexpr(gl.BlockedLayout([1, 4], [1, 32], [2, 1], [1, 0]))
READERS = gl.constexpr(gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0]))


@gluon.jit
def offsets(LAYOUT: gl.constexpr):
    row = gl.arange(0, ROWS_OF_TILE, gl.SliceLayout(1, LAYOUT))
    return row[:, None] * COLUMNS + gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))[None, :]


@gluon.jit
def copy_tiles(x_ptr, y_ptr, turns, tiles, full, empty, IS_RACE: gl.constexpr):
    for turn in range(turns):
        stage, phase = turn % STAGES, (turn // STAGES) & 1
        mbarrier.wait(empty.index(stage), phase ^ 1)
        cp_async(tiles.index(stage), x_ptr + (turn * TILE + offsets(LANES)))
        cp_async_arrive(full.index(stage), increment_count=False)
    cp_async_commit()
    cp_async_wait(0)


@gluon.jit
def read_tiles(x_ptr, y_ptr, turns, tiles, full, empty, IS_RACE: gl.constexpr):
    for turn in range(turns):
        stage, phase = turn % STAGES, (turn // STAGES) & 1
        if not IS_RACE:
            mbarrier.wait(full.index(stage), phase)
        tile = tiles.index(stage).load(READERS)
        if IS_RACE:
            mbarrier.wait(full.index(stage), phase)
        barrier()
        mbarrier.arrive(empty.index(stage), count=1)
        gl.store(y_ptr + (turn * TILE + offsets(READERS)), tile)


@gluon.jit
def control_kernel(x_ptr, y_ptr, turns, IS_RACE: gl.constexpr):
    layout: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [1, 0])
    tiles = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS_OF_TILE, COLUMNS], layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=64)
        mbarrier.init(empty.index(i), count=1)
    given = (x_ptr, y_ptr, turns, tiles, full, empty, IS_RACE)
    gl.warp_specialize([(read_tiles, given), (copy_tiles, given)], [2], [64])


def control(is_race):
    turns = 8
    x = torch.randn(turns * TILE.value, device="cuda")
    y = torch.zeros_like(x)
    control_kernel[(2,)](x, y, turns, is_race, num_warps=4)
    torch.cuda.synchronize()
    print("control", "race" if is_race else "", torch.equal(x, y), flush=True)


def make_call(dtype):
    """Return a call of STEPS steps on a copy of a pool, which returns outputs and the pool's tensors."""
    torch.manual_seed(0)
    new = lambda *size: torch.randn(*size, device="cuda", dtype=torch.bfloat16)  # noqa: E731
    pool = gdn.allocate_history_pool(
        ROWS, num_k_heads=H, num_v_heads=HV, head_k_dim=D, head_v_dim=D, places=PLACES, room=1,
        state_dtype=dtype, state_v_first=True, device="cuda",
    )  # fmt: skip
    pool.state.copy_(torch.randn(ROWS, HV, D, D, device="cuda") / 12)
    pool.history_u.copy_(new(*pool.history_u.shape) / 4)
    pool.history_k.copy_(torch.nn.functional.normalize(new(*pool.history_k.shape), dim=-1))
    pool.history_G.copy_(-torch.rand(*pool.history_G.shape, device="cuda").double().cumsum(1) / 8)
    pool.cursor[:, 0] = torch.arange(ROWS) % PLACES
    pool.cursor[:, 1] = 12 + torch.arange(ROWS) % 4
    steps = []
    for step in range(STEPS):
        slots = torch.randperm(ROWS, device="cuda").int()
        slots[step::17] = -1
        x = {"q": new(ROWS, 1, H, D), "k": new(ROWS, 1, H, D), "v": new(ROWS, 1, HV, D)}
        gates = {"a": new(ROWS, 1, HV), "b": new(ROWS, 1, HV)}
        gates |= {"A_log": torch.zeros(HV, device="cuda"), "dt_bias": torch.zeros(HV, device="cuda")}
        steps.append(x | gates | {"read_index": slots})

    def run():
        held = {n: x.clone() if torch.is_tensor(x) else x for n, x in vars(pool).items()}
        copy = gdn.HistoryPool(**held)
        outputs = [
            gdn.decode_with_history(
                **x, pool=copy, state_v_first=True, use_qk_l2norm_in_kernel=True, use_history=True,
                backend="hopper",
            )
            for x in steps
        ]  # fmt: skip
        return [*outputs, *(x for x in vars(copy).values() if torch.is_tensor(x))]

    return run


def problems():
    for form in FORMS:
        call = make_call(form)
        with launch.record_launches([]) as launches:
            call()
        names = [getattr(one.kernel, "__name__", str(one.kernel)) for one, _ in launches]
        call()
        torch.cuda.synchronize()
        print(form, *names, flush=True)


def reruns(count):
    for form in FORMS:
        call = make_call(form)
        first = [x.view(torch.uint8) for x in call()]
        same = all(
            all(torch.equal(x.view(torch.uint8), y) for x, y in zip(call(), first, strict=True))
            for _ in range(count)
        )
        print(form, f"{count} reruns:", "equal bits" if same else "OTHER BITS", flush=True)


if __name__ == "__main__":
    what, *rest = sys.argv[1:]
    {
        "problems": problems,
        "control": lambda n="0": control(n == "1"),
        "reruns": lambda n="200": reruns(int(n)),
    }[what](*rest)
