"""Which layers have experts, as Megatron's --moe-layer-freq spells it: a whole number or a list written with +, * and brackets."""

from __future__ import annotations

import ast
from typing import Any

from search_spaces.whole import MOST_LAYERS


def layer_pattern(text: str) -> int | tuple[int, ...]:
    """The value of an expression such as "[0]*3+[1]*58" (arguments.py moe_freq_type); nothing in it is executed.

    Raises:
        ValueError: it is no such expression, or stands for more layers than a model may have.
    """
    try:
        value = _evaluate(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, TypeError):
        raise _no_pattern(text) from None
    if isinstance(value, int):
        return value
    return tuple(value)


def _evaluate(node: ast.expr) -> Any:
    """The value of a list expression: numbers, lists, + and * only."""
    match node:
        case ast.Constant(value=int() as number):
            return number
        case ast.List(elts=items):
            return [_number(item) for item in items]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _bounded(_evaluate(left) + _evaluate(right))
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return _product(_evaluate(left), _evaluate(right))
    raise _no_pattern(ast.unparse(node))


def _number(node: ast.expr) -> int:
    value = _evaluate(node)
    if not isinstance(value, int):
        raise _no_pattern(ast.unparse(node))
    return value


def _product(left: Any, right: Any) -> Any:
    """A list repeated, or two numbers multiplied; judged before it is built."""
    sizes = [len(side) if isinstance(side, list) else side for side in (left, right)]
    if sizes[0] * sizes[1] > MOST_LAYERS:
        raise ValueError(f"a list of layers has at most {MOST_LAYERS:,} entries, not {sizes[0] * sizes[1]:,}")
    return left * right


def _bounded(value: Any) -> Any:
    if isinstance(value, list) and len(value) > MOST_LAYERS:
        raise ValueError(f"a list of layers has at most {MOST_LAYERS:,} entries, not {len(value):,}")
    return value


def _no_pattern(text: str) -> ValueError:
    return ValueError(f"a list of layers is written with numbers, [..], + and *, not {text!r}")
