"""Compare two made-up dumps of machine code."""

import json

import pytest
from kit import machine_code

SASS = """
        code for sm_90
                Function : walk_kernel
        .headerflags    @"EF_CUDA_SM90"
        /*0000*/                   LDC R1, c[0x0][0x28] ;        /* 0x00000a00ff017b82 */
                                                                 /* 0x000fe20000000800 */
        /*0010*/              @!P0 STL.64 [R1], R2 ;             /* 0x0000000002007387 */
        /*0020*/                   FADD R2, R3, R4 ;             /* 0x0000000403027221 */
"""


def dumped(folder, **named):
    folder.mkdir()
    for name, text in named.items():
        record = {"name": f"{name} D=64 [bf16]", "registers": 40, "sass": machine_code.instructions(text)}
        (folder / f"{name}.json").write_text(json.dumps(record))
    return folder


def test_a_difference_is_seen(tmp_path):
    """Find a changed instruction, a changed register and a missing kernel; accept a renamed one."""
    a = dumped(tmp_path / "a", walk_kernel=SASS, solve_kernel=SASS)
    same = dumped(tmp_path / "same", scan_kernel=SASS.replace("walk", "scan"), solve_kernel=SASS)
    assert machine_code.compare(a, same, {"walk_kernel": "scan_kernel"}) == []
    assert [message.split()[0] for message in machine_code.compare(a, same)] == ["only", "only"]
    b = dumped(
        tmp_path / "b", walk_kernel=SASS.replace("FADD", "FMUL"), solve_kernel=SASS.replace("R3", "R9")
    )
    solve, walk = sorted(machine_code.compare(a, b), key=lambda message: "walk_kernel" in message)
    assert "other opcodes" in walk and "walk_kernel" in walk
    assert "the same opcodes" in solve and "3 instructions, 40 registers, 1 local" in solve


@pytest.mark.parametrize("text, status", [(SASS, 0), (SASS.replace("R3", "R9"), 1)])
def test_the_command_fails_if_there_is_a_difference(tmp_path, monkeypatch, capsys, text, status):
    a, b = dumped(tmp_path / "a", walk_kernel=SASS), dumped(tmp_path / "b", scan_kernel=text)
    command = ["machine_code", "compare", str(a), str(b), "--rename", "walk_kernel=scan_kernel"]
    monkeypatch.setattr("sys.argv", command)
    with pytest.raises(SystemExit) as done:
        machine_code.main()
    assert done.value.code == status
    assert f"{1 - status} of 1 binaries have the same SASS" in capsys.readouterr().out
