"""Changes of behaviour that a test of the usual result does not notice.

If the operator in a line changes, a test that runs the line usually notices. The changes in this module
rarely affect the usual result. They drop one of several conditions, exchange two statements, drop a cleanup
or a reset, take a value from another argument, or set an option to its default.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from itertools import pairwise
from textwrap import indent
from typing import Any

import attrs

from tools.mutants.operators import Mutation, Visitor

CONDITION = "a condition of several is dropped"
ORDER = "two statements change places"
KEPT = "something is kept that should be dropped"
RESTORE = "something is not put back"
OTHER_SOURCE = "a value comes from another argument"
OPTION = "an option is ignored"
KINDS = (CONDITION, ORDER, KEPT, RESTORE, OTHER_SOURCE, OPTION)

FORGETTING = {"clear", "pop", "popitem", "discard", "remove", "close", "cache_clear", "unlink", "remove_hook", "detach"}
"""Methods that release a resource if a call of them is a statement."""


def behaviours_of(file: str, source: str) -> list[Mutation]:
    """Return all such changes of a file, in the order of the lines."""
    return sorted({one for one in _Behaviours(file, source).visit_body(ast.parse(source)) if one.kind in KINDS})


class _Behaviours(Visitor):
    """Visits the statements of a file, and yields changes of behaviour."""

    def of_kind(self, kind: str, mutations: Iterator[Mutation]) -> Iterator[Mutation]:
        return (attrs.evolve(mutation, kind=kind) for mutation in mutations)

    def function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[Mutation]:
        inner = list(super().function(node))
        if not inner and self.is_untested(node):
            return
        yield from inner
        self.names.append(node.name)
        yield from self._ignored_options(node)
        yield from self._other_sources(node)
        self.names.pop()

    def statement(self, node: ast.stmt) -> Iterator[Mutation]:
        match node:
            case ast.Expr(value=ast.Call(func=ast.Attribute(attr=name))) if name in FORGETTING:
                yield from self.of_kind(KEPT, self.change(node, "pass"))
            case ast.Delete():
                yield from self.of_kind(KEPT, self.change(node, "pass"))
            case ast.With(items=[ast.withitem(optional_vars=None)], body=body):
                text = ast.unparse(ast.If(ast.Constant(True), body, []))
                yield from self.of_kind(RESTORE, self.change(node, indent(text, " " * node.col_offset).lstrip()))
            case ast.Try(finalbody=[_, *_] as final):
                for one in final:
                    yield from self.of_kind(RESTORE, self.change(one, "pass"))
        for body in _bodies(node):
            yield from self._swapped(body)

    def expression(self, node: ast.expr) -> Iterator[Mutation]:
        if isinstance(node, ast.BoolOp):
            for position in range(len(node.values)):
                left = node.values[:position] + node.values[position + 1 :]
                yield from self.of_kind(CONDITION, self.change(node, left[0] if len(left) == 1 else ast.BoolOp(node.op, left)))

    def call(self, node: ast.Call) -> Iterator[Mutation]:
        if self.says_something(node):
            return
        yield from self.visit_body(node)

    def _swapped(self, body: Sequence[ast.stmt]) -> Iterator[Mutation]:
        """Yield exchanges of two neighbouring statements. One of them acts on an object that the other uses,
        and neither binds a name that the other uses or binds."""
        for first, second in pairwise(body):
            if not all(isinstance(one, ast.Expr | ast.Assign | ast.AugAssign) for one in (first, second)) or _is_text(first):
                continue
            acted, used, bound = ([of(one) for one in (first, second)] for of in (_acted_on, _used, _bound))
            if (acted[0] & used[1] or acted[1] & used[0]) and not (bound[0] & (used[1] | bound[1]) or bound[1] & used[0]):
                start, end = self.span(first)[0], self.span(second)[1]
                between = self.source[self.span(first)[1] : self.span(second)[0]]
                if "#" in between or ";" in between:
                    continue
                new = self.text(second) + between + self.text(first)
                yield Mutation(self.file, ".".join(self.names), first.lineno, start, end, self.source[start:end], new, kind=ORDER)

    def _ignored_options(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[Mutation]:
        """For each parameter that has a default and that the body reads, yield a new first statement that
        sets the parameter to the default."""
        body = [one for one in node.body if not _is_text(one)]
        if not body or isinstance(body[0], ast.Pass | ast.Raise):
            return
        read = {name for one in body for name in _names(one, ast.Load)}
        positional = [*node.args.posonlyargs, *node.args.args]
        pairs = [*zip(positional[len(positional) - len(node.args.defaults) :], node.args.defaults, strict=True)]
        pairs += [(one, default) for one, default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True) if default is not None]
        for argument, default in pairs:
            if argument.arg in read:
                at = self.offset(body[0].lineno, body[0].col_offset)
                new = f"{argument.arg} = {ast.unparse(default)}\n{' ' * body[0].col_offset}"
                yield Mutation(self.file, ".".join(self.names), body[0].lineno, at, at, "", new, kind=OPTION)

    def _other_sources(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[Mutation]:
        """For each use of a parameter, yield replacements of the parameter by others with the same
        annotation."""
        arguments = [one for one in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs) if one.annotation is not None]
        kinds = {one.arg: ast.unparse(one.annotation) for one in arguments if one.annotation is not None}
        for statement in node.body:
            for name in _inside(statement):
                if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Load) and name.id in kinds:
                    for other, kind in kinds.items():
                        if other != name.id and kind == kinds[name.id]:
                            yield from self.of_kind(OTHER_SOURCE, self.change(name, other))


def _bodies(node: ast.AST) -> Iterator[list[ast.stmt]]:
    for field in ("body", "orelse", "finalbody"):
        body = getattr(node, field, None)
        if isinstance(body, list):
            yield body


def _inside(node: ast.AST) -> Iterator[Any]:
    """Yield the nodes below a node that run when this node runs. Messages, annotations and inner functions
    are left out."""
    if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
        return
    if isinstance(node, ast.Call) and Visitor.says_something(node):
        return
    yield node
    for name, value in ast.iter_fields(node):
        if name != "annotation":
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from _inside(child)


def _names(node: ast.AST, context: type[ast.expr_context]) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, context)}


def _bound(node: ast.stmt) -> set[str]:
    return _names(node, ast.Store)


def _used(node: ast.stmt) -> set[str]:
    """Return the names and dotted names in a statement. ``self`` alone is included only if a method of
    ``self`` is called."""
    found = {ast.unparse(one) for one in ast.walk(node) if isinstance(one, ast.Name | ast.Attribute)} - {"self"}
    own = (one for one in ast.walk(node) if isinstance(one, ast.Call) and isinstance(one.func, ast.Attribute))
    return found | {"self" for one in own if ast.unparse(one.func.value) == "self"}


def _acted_on(node: ast.stmt) -> set[str]:
    """Return the objects that a statement may change: the object of a called method, or the arguments of a
    called function."""
    match node:
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name("os" | "shutil" | "torch")) | ast.Name(), args=args)):
            return {ast.unparse(one) for one in args}
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=value))):
            return {ast.unparse(value)}
        case (
            ast.Assign(targets=[ast.Attribute() | ast.Subscript() as target])
            | ast.AugAssign(target=ast.Attribute() | ast.Subscript() as target)
        ):
            return {ast.unparse(target), ast.unparse(target.value)} - {"self"}
        case _:
            return set()


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
