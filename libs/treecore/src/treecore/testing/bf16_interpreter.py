"""Repairs bf16 in triton 3.6's interpreter, which holds it as uint16. Knows the interpreter's insides; tests only.

As it comes, tl.dot multiplies the raw bits, elementwise arithmetic is garbage and fp32 to bf16 truncates. Afterwards
dot and rounding are right, and elementwise arithmetic on bf16 raises: kernels are to compute in fp32.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

_ARITHMETIC = (
    *("create_fadd", "create_fmul", "create_fdiv", "create_fsub", "create_frem", "create_precise_divf", "create_fma"),
    *("create_minimumf", "create_minnumf", "create_maximumf", "create_maxnumf", "create_clampf", "create_fabs"),
    *("create_exp", "create_exp2", "create_log", "create_log2", "create_sqrt", "create_precise_sqrt", "create_rsqrt"),
    *("create_fcmpOLT", "create_fcmpOGT", "create_fcmpOLE", "create_fcmpOGE", "create_fcmpOEQ", "create_fcmpUNE"),
)


def repair_bf16() -> None:
    """Patch the interpreter of this process; once."""
    convert = interpreter._convert_float

    def rounded(data: Any, src: Any, dst: Any, mode: Any) -> Any:
        if src == tl.float32 and dst == tl.bfloat16:
            return to_bf16_bits(data)
        if src == tl.bfloat16 and dst == tl.float32:
            return from_bf16_bits(data).view(np.uint32)
        return convert(data, src, dst, mode)

    interpreter._convert_float = rounded
    builder = interpreter.InterpreterBuilder
    builder.create_dot = _dot
    for name in _ARITHMETIC:
        setattr(builder, name, _refusing(name, getattr(builder, name)))
    reduce = interpreter.ReduceOps.apply_impl
    interpreter.ReduceOps.apply_impl = lambda self, operand: reduce(self, _checked("a reduction", operand))


def to_bf16_bits(values: np.ndarray) -> np.ndarray:
    """uint16, rounded to nearest, ties to even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    is_nan = np.isnan(values)
    nearest = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(is_nan, np.uint32(0x7FC0), nearest).astype(np.uint16)


def from_bf16_bits(bits: np.ndarray) -> np.ndarray:
    """float32, exactly."""
    return (np.ascontiguousarray(bits).astype(np.uint32) << np.uint32(16)).view(np.float32)


def dot_in_fixed_order(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    """In place of InterpreterBuilder.create_dot: every entry by the same sums, wherever in a tile it stands.

    So do matrix units; numpy's BLAS does not (half of the rows change a bit when they change their place).
    """
    left, right = _operands(a, b)
    total = d.data.copy()
    for column, row in zip(left.T, right, strict=True):
        total += column[:, None] * row[None, :]
    return interpreter.TensorHandle(total, d.dtype.scalar)


def _dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    left, right = _operands(a, b)
    return interpreter.TensorHandle(np.matmul(left, right, dtype=d.data.dtype) + d.data, d.dtype.scalar)


def _operands(*handles: Any) -> list[Any]:
    return [from_bf16_bits(x.data) if x.dtype.scalar == tl.bfloat16 else x.data for x in handles]


def _refusing(name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
    def checked(self: Any, *operands: Any) -> Any:
        for operand in operands:
            if getattr(operand, "dtype", None) is not None and operand.dtype.scalar == tl.bfloat16:
                raise TypeError(f"{name[7:]} on bf16: cast to fp32 first")
        return operation(self, *operands)

    return checked


def _checked(name: str, operand: Any) -> Any:
    for tensor in operand if isinstance(operand, tuple) else (operand,):
        if tensor.dtype.scalar == tl.bfloat16:
            raise TypeError(f"{name} on bf16: cast to fp32 first")
    return operand
