"""The walk through machine code that compile_kernels.py relies on."""

import importlib.util
from pathlib import Path

import pytest

LOOP = """
        /*0100*/  LDS.128 R4, [R72+0x8000] ;
        /*0110*/  HADD2.BF16_V2 R76, R4, R74 ;
        /*0120*/  HGMMA.64x64x16.F32.BF16 R24, R72, gdesc[UR16], R24, gsb0 ;
        /*0130*/  HGMMA.64x64x16.F32.BF16 R24, R76, gdesc[UR16], R24, gsb0 ;
        /*0140*/  WARPGROUP.DEPBAR.LE gsb0, WAIT ;
        /*0150*/  LDGSTS.E.BYPASS.128 [R76], desc[UR14][R8.64], P5 ;
        /*0160*/  @P0 BRA 0x100 ;
        /*0170*/  EXIT ;
"""


@pytest.fixture(scope="module")
def hazards():
    spec = importlib.util.spec_from_file_location("hazards", Path(__file__).with_name("hazards.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.hazards


def test_writes_to_operands_in_flight_are_found(hazards):
    """The second time round, R76 is an operand of the multiplication that a wait for all but one lets run on."""
    assert hazards(LOOP.replace("WAIT", "0x1")) == ["HADD2.BF16_V2 R76, R4, R74 "]
    assert hazards(LOOP.replace("WAIT", "0x0")) == []
    assert hazards(LOOP.replace("WAIT", "0x1").replace("R76, R4, R74", "R72, R4, R74")) == []
