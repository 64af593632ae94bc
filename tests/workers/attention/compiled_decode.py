"""Compiles the decode kernels for GPUs, which needs none: the interpreter lets pass what the compiler refuses.

A program of its own, because Triton decides between interpreter and compiler when it is imported.
"""

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from workers.attention import paged_decode

CAPABILITIES = (80, 90)
SHARED_MEMORY = 99 * 1024  # bytes that a block may have on the smallest of these GPUs

HALF, FLOAT, INTS = "*bf16", "*fp32", "*i32"
ATTEND = {
    "query": HALF,
    "pages": HALF,
    "block_tables": INTS,
    "contexts": INTS,
    "found": FLOAT,
    "weights": FLOAT,
    "query_row": "i32",
    "query_head": "i32",
    "table_row": "i32",
    "page_head": "i64",
    "scale": "fp32",
    "window": "i32",
}
JOIN = {"found": FLOAT, "weights": FLOAT, "out": HALF}


def compile_for(kernel: Any, capability: int, arguments: dict[str, str], constants: dict[str, int]) -> Any:
    signature = {name: arguments.get(name, "constexpr") for name in kernel.arg_names}
    constexprs = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    return triton.compile(ASTSource(kernel, signature, constexprs), target=GPUTarget("cuda", capability, 32))


def main() -> None:
    shape = {"HEAD_DIM": 64, "PARTS": 4, "WIDTH": 64}
    for capability in CAPABILITIES:
        attend = compile_for(
            paged_decode._attend_part,
            capability,
            ATTEND,
            {**shape, "KV_HEADS": 2, "GROUP": 3, "BLOCK_SIZE": 16, "TILE": 64, "ROWS": 16},
        )
        assert "mma" in attend.asm["ptx"], "products run on tensor cores"
        assert attend.metadata.shared <= SHARED_MEMORY
        compile_for(paged_decode._join_parts, capability, JOIN, {**shape, "NUM_HEADS": 6, "SLOTS": 4})


if __name__ == "__main__":
    main()
