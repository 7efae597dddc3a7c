"""Compare the kernels in Triton's interpreter with torch: ``interpret.py DTYPE...``; run by test_kernels.py."""

import sys

import interpret_gemma
import interpret_groot
import interpret_kernels
import interpret_towers

if __name__ == "__main__":
    interpret_kernels.prepare_interpreter()
    interpret_kernels.round_to_fp8()
    for dtype in sys.argv[1:]:
        for part in (interpret_kernels, interpret_towers, interpret_gemma, interpret_groot):
            part.main(dtype)
