"""Compare one decoder layer and a choice of tokens in Triton's interpreter with torch."""

import functools
import inspect
from dataclasses import replace

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

from vla_ros_models.engine.decoder import decode, parallel, verify
from vla_ros_models.engine.kernel_check import check_products
from vla_ros_models.engine.ops import Ops, prompt_positions, rounded
from vla_ros_models.engine.ranks import Ranks
from vla_ros_models.engine.shapes import DecoderShape
from vla_ros_models.engine.stream import KVCache, Positions, Stream
from vla_ros_models.engine.tile_configs import PACKED_ROWS, SKINNY, Tile
from vla_ros_models.engine.triton_ops import TritonOps
from vla_ros_models.engine.weights import QUANTIZATIONS, DecoderWeights, Layer, Matrix, quantize, rotary_tables

SHAPE = DecoderShape(64, 96, 1, 4, 2, 16, vocab_size=80, max_positions=SKINNY + 8)
QUANTIZED_TILES = {
    "attend": Tile(64, stages=1, splits=2, block_m=16),
    "gemm": Tile(32, stages=2, block_m=32, tail_m=0, splits=2),
}
"""Attention without programs that see nothing, which dense weights have; products whose inputs are split."""


def prepare_interpreter() -> None:
    """Let loop bounds be arrays of one element, which current numpy does not convert, and save most of the time.

    In every call of a function, the interpreter searches the language for builtins and replaces them; in every
    operation, it makes a table of types, and names, shapes and sizes of its result; every sum of integers it makes
    again with 64 bits, to find overflows.
    """
    original = interpreter._patch_lang_tensor

    def patch_tensor(tensor, scope):
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    @functools.cache
    def builtins(package):
        return [each for each in inspect.getmembers(package) if tl.core.is_builtin(each[1])]

    def patch_builtins(package, builder, scope):
        for name, member in builtins(package):
            if getattr(package, name) is member:
                interpreter._patch_attr(package, name, member, builder, scope)

    patch_once = functools.cache(interpreter._patch_lang)
    interpreter._patch_lang = lambda function: patch_once(function) and interpreter._LangPatchScope()
    interpreter._patch_lang_tensor = patch_tensor
    interpreter._patch_builtin = patch_builtins
    stored = functools.cache(interpreter._get_np_dtype)
    interpreter._get_np_dtype = lambda kind: stored(tl.uint64 if kind.scalar.is_ptr() else kind.scalar)
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    keep_attributes(tl.core.block_type, lambda kind, shape: (kind.name, *map(tl.core._unwrap_if_constexpr, shape)))
    keep_attributes(tl.core.tensor, lambda handle, kind: kind.name, "handle", "type")


def keep_attributes(cls, key_of, *own) -> None:
    """Compute the attributes of instances with the same key once; the constructor's arguments ``own`` are set."""
    original, kept = cls.__init__, {}

    def init(self, *arguments):
        key = key_of(*arguments)
        if key not in kept:
            original(self, *arguments)
            kept[key] = dict(vars(self))
        vars(self).update(kept[key])
        vars(self).update(zip(own, arguments, strict=False))

    cls.__init__ = init


def round_to_fp8() -> None:
    """The interpreter loses the carry where rounding to 8 bits reaches the next power of two."""
    original = interpreter._convert_float

    def convert(values, source, target, mode):
        if target.name != "fp8e4nv":
            return original(values, source, target, mode)
        wide = values if values.dtype == np.float32 else original(values, source, tl.float32, mode).view(np.float32)
        return torch.from_numpy(np.array(wide)).to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    interpreter._convert_float = convert


def make_weights(shape: DecoderShape, kind: str, dtype: torch.dtype) -> DecoderWeights:
    generator = torch.Generator().manual_seed(5)

    def noise(*size: int) -> torch.Tensor:
        return (torch.randn(*size, generator=generator) / size[-1] ** 0.5).to(dtype)

    def gain() -> torch.Tensor:
        return (1 + 0.1 * torch.randn(shape.hidden_size, generator=generator)).to(dtype)

    def matrix(role: str, *size: int) -> Matrix:
        return quantize(noise(*size), kind, role)

    heads = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    layers = tuple(
        Layer(
            matrix("qkv", heads, shape.hidden_size),
            matrix("o_proj", shape.hidden_size, shape.heads * shape.head_dim),
            matrix("gate_up", 2 * shape.intermediate_size, shape.hidden_size),
            matrix("down_proj", shape.hidden_size, shape.intermediate_size),
        )
        for _ in range(shape.layers)
    )
    cosine, sine = rotary_tables(shape)
    embedding = torch.randn(shape.vocab_size, shape.hidden_size, generator=generator).to(dtype)
    head = quantize(noise(shape.vocab_size, shape.hidden_size), "none", "lm_head")
    norms = tuple(gain() for _ in range(2 * shape.layers + 1))
    return DecoderWeights(shape, layers, norms, cosine.to(dtype), sine.to(dtype), embedding, head)


def close(name: str, ours: torch.Tensor, theirs: torch.Tensor, bound: float) -> None:
    """Relative error in the norm, as float64; NaN does not pass."""
    ours, theirs = ours.double(), theirs.double()
    error = ((ours - theirs).norm() / theirs.norm()).item()
    assert error <= bound, f"{name}: relative error {error:.2e}, at most {bound:.0e} expected"


def poisoned(weights: DecoderWeights) -> KVCache:
    """A cache whose unwritten places would show: large, but finite."""
    cache = KVCache.allocate(weights, 2, 40)
    for part in (*cache.keys, *cache.values):
        part.fill_(100.0)
    return cache


def many_groups(weights: DecoderWeights, kind: str, dtype: torch.dtype, bound: float) -> None:
    """Weights of several groups, the last one not full, for every shape of program that tuning may choose."""
    generator = torch.Generator().manual_seed(2)
    matrices = [
        quantize(torch.randn(32, width, generator=generator).to(dtype), kind, "down_proj") for width in (680, 768)
    ]
    tiles = (Tile(16, 512, 4, 4), Tile(32, 256, 2, 3), Tile(16, 1024, 4, 3))
    for number, (rows, tile) in enumerate(
        zip((1, 9, PACKED_ROWS + 3, SKINNY + 6, SKINNY + 16), (*tiles, *tiles[:2]), strict=True)
    ):
        matrix = matrices[number // 4]
        x = torch.randn(1, rows, matrix.inputs, generator=generator).to(dtype)
        hidden = torch.randn(1, rows, matrix.outputs, generator=generator).to(dtype)
        norms = (torch.ones(matrix.outputs, dtype=dtype),) * 3
        weights = DecoderWeights(replace(SHAPE, hidden_size=32), (Layer(matrix),), norms, hidden, hidden)
        at = Positions(torch.arange(rows)[None], hidden, hidden)
        expected = Ops().add(weights, Stream(hidden), x, matrix, at).hidden
        gemm = Tile(128, warps=8, stages=2, block_m=64, tail_m=16, splits=tile.warps - 1, k_groups=2)
        tiles_of = {"decode": tile, "gemm": gemm if dtype != torch.float32 else None}
        ops = TritonOps(lambda work, tiles_of=tiles_of: tiles_of[work.kernel])
        added = ops.add(weights, ops.gather(weights, hidden[0], torch.arange(rows)[None]), x, matrix, at)
        if added.branch is not None:
            ops.norm(weights, added)  # adds it
        close(f"{rows} rows, {tile}", added.hidden, expected, bound)


def check_choice(ours: Ops, theirs: Ops, generator: torch.Generator) -> None:
    """Ties, order and NaN in the choice of a token."""
    table = torch.randn(1, 5, 5000, generator=generator)
    table[0, 1, [7, 4999]] = 9.0
    table[0, 2, 3] = float("nan")
    for a, b in zip(ours.choose(table), theirs.choose(table), strict=True):
        assert torch.equal(a[0, [0, 1, 3, 4]], b[0, [0, 1, 3, 4]])
    assert ours.choose(table)[0][0, 1] == 7
    assert ours.choose(table)[1][0, 2].isnan()


def compare(kind: str, name: str) -> None:
    dtype = getattr(torch, name)
    bound = 1e-5 if dtype == torch.float32 else 2e-2
    weights = make_weights(SHAPE, kind, dtype)
    ours = TritonOps(lambda work: QUANTIZED_TILES.get(work.kernel) if kind != "none" else None)
    theirs = Ops()

    # Few rows: every kernel of a decoding pass, two observations at different positions.
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, weights.shape.vocab_size, (2, 6), generator=generator)
    start = torch.zeros(2, dtype=torch.int32)
    results = []
    for ops in (ours, theirs):
        cache = poisoned(weights)
        verify(weights, ops, cache, tokens[:, :5], start)
        results.append((verify(weights, ops, cache, tokens, start + torch.tensor([5, 3])), cache))
    close("verify", results[0][0], results[1][0], bound)
    for a, b in zip(
        results[0][1].keys + results[0][1].values, results[1][1].keys + results[1][1].values, strict=True
    ):
        close("cache", a, b, bound)

    # One row at a time gives several at once, to the bit where both use the same tile.
    cache = poisoned(weights)
    logits = verify(weights, ours, cache, tokens[:, :2], start)
    again = poisoned(weights)
    for row in range(2):
        single = verify(weights, ours, again, tokens[:, row : row + 1], start + row)
        assert torch.equal(single[:, 0], logits[:, row]), f"row {row} depends on its neighbours"
    alone = verify(weights, ours, KVCache.allocate(weights, 1, 40), tokens[:1, :1], start[:1])
    # With a tile of its own, NumPy's BLAS may add in another order; test_cuda.py compares the bits on a GPU.
    close("a single row", alone[0, 0], logits[0, 0], bound)
    if kind == "none":
        check_choice(ours, theirs, generator)
        # Programs that share a head: some see nothing, and some rows.
        other = TritonOps(lambda work: Tile(2, stages=2, splits=3) if work.kernel == "attend" else None)
        logits_of = {count: verify(weights, other, poisoned(weights), tokens[:, :count], start) for count in (2, 1)}
        close("shared heads", logits_of[2], logits, bound)
        close("a row of shared heads", logits_of[1][:, 0], logits_of[2][:, 0], bound)
        chosen, margins = decode(weights, ours, cache, tokens[:, 3], start + 3, 1)
        assert chosen.shape == (2, 1)
        assert margins.isfinite().all()

    # Many rows: norm, product, rotation and activation of a prefill.
    rows, layer = SKINNY // 2 + 3, weights.layers[0]
    hidden = torch.randn(2, rows, weights.shape.hidden_size, generator=generator).to(dtype)
    stream = Stream(hidden)
    if kind == "fp8" or (kind == "int4" and dtype != torch.float32):
        bound = 2e-2  # where a norm rounds differently, a number may be quantised to the next one
    caches = [poisoned(weights), poisoned(weights)]
    at = [
        one.positions(weights, cache, prompt_positions(hidden), prompt=True)
        for one, cache in zip((ours, theirs), caches, strict=True)
    ]
    queries = [
        one.qkv(weights, 0, stream, places, cache)
        for one, places, cache in zip((ours, theirs), at, caches, strict=True)
    ]
    close("prefill queries", queries[0], queries[1], bound)
    close("prefill keys", caches[0].keys[0], caches[1].keys[0], bound)
    close("prefill values", caches[0].values[0], caches[1].values[0], bound)
    expected = theirs.gate_up(weights, 0, stream, at[1])
    ups = (rounded(one, layer.down_proj) for one in (ours.gate_up(weights, 0, stream, at[0]), expected))
    close("gate", *(one.view_as(expected) for one in ups), bound)
    mixed = queries[1].reshape(2, rows, -1)
    added = ours.add(weights, replace(stream, hidden=hidden.clone()), mixed, layer.o_proj, at[0])
    expected = theirs.add(weights, stream, mixed, layer.o_proj, at[1])
    close("residual", ours.norm(weights, added), theirs.norm(weights, expected), bound)

    # A whole sequence, in which every row sees every other but the padding: more than a block of positions.
    block, many = (16, 17) if dtype == torch.float32 else (64, SKINNY // 2 + 1)
    sizes = {"none": ((block + 6, block + 3), (5, 3)), "int4": ((many, many),)}
    for size, length in sizes.get(kind, ()):
        sequence = torch.randn(2, size, weights.shape.hidden_size, generator=generator).to(dtype)
        sequence[0, length:] *= 50
        sequence[1, length - 2 :] *= 50
        wanted = torch.tensor([[0], [size]]) + torch.arange(length - 2)
        count = torch.tensor([length, length - 2], dtype=torch.int32)
        caches = [KVCache.allocate(weights, 2, size, layers=1) for _ in range(2)]
        states = [
            parallel(weights, ops, cache, sequence, wanted, count)
            for ops, cache in zip((ours, theirs), caches, strict=True)
        ]
        close(f"{length} of {size} rows", *states, bound)

    if dtype != torch.float32 and kind == "none":
        check_products(ours, weights)  # what the engine asks itself at the start
    split = TritonOps(lambda work: QUANTIZED_TILES.get(work.kernel) if kind != "none" else None, ranks=Ranks())
    cache = poisoned(weights)
    verify(weights, split, cache, tokens[:, :5], start)
    logits = verify(weights, split, cache, tokens, start + torch.tensor([5, 3]))
    close("verify of a shard", logits, results[1][0], bound)
    single = verify(weights, split, KVCache.allocate(weights, 1, 40), tokens[:1, :1], start[:1])
    close("a single row of a shard", single[0, 0], alone[0, 0], bound)
    added = split.add(weights, Stream(hidden.clone()), mixed, layer.o_proj, at[0])
    expected = theirs.add(weights, Stream(hidden), mixed, layer.o_proj, at[1])
    close("residual of a shard", split.norm(weights, added), theirs.norm(weights, expected), bound)
    if layer.qkv.packed:
        many_groups(weights, kind, dtype, bound)
    print("equal", kind)


def main(name: str) -> None:
    # Each quantisation in the type whose bound is nearer to its own errors; 4 bits in both, see ``ops.rounds``.
    left_out = "fp8" if name == "float32" else "int8"
    for kind in QUANTIZATIONS:
        if kind != left_out:
            compare(kind, name)
