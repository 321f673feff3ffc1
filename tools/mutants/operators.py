"""Single changes of Python code, such as another comparison, a removed statement or another return value."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator, Sequence
from copy import deepcopy

import attrs

COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
OPPOSITES = (
    "min max",
    "any all",
    "amin amax",
    "argmin argmax",
    "floor ceil",
    "minimum maximum",
    "startswith endswith",
    "clamp_min clamp_max",
)
OPPOSITE = {a: b for pair in OPPOSITES for a, b in (pair.split(), pair.split()[::-1])}
# Calls with messages as arguments, and methods that return only messages.
SPEAKING = {"warn", "warning", "info", "debug", "error", "exception", "log", "print", "say", "add_argument"}
TEXT_METHODS = {"__repr__", "__str__"}
COMMUTATIVE = {"min", "max", "minimum", "maximum", "gcd", "equal", "isclose", "allclose", "add", "mul"}
UNTESTED = {"TYPE_CHECKING", "overload", "jit"}  # conditions and decorators of code that this machine never runs


@attrs.frozen(order=True)
class Mutation:
    """One change of a file: `new` replaces the characters from `start` to `end`.

    `function` is the dotted name of the innermost definition. `kind` is the kind of mistake.
    """

    file: str
    function: str
    line: int
    start: int
    end: int
    old: str
    new: str
    kind: str = "operator"

    def rank(self, seed: int) -> str:
        """Return a random sort key of a mutation. The key does not depend on other files or on earlier
        lines."""
        return hashlib.sha256(f"{seed} {self.file} {self.function} {self.old} {self.new}".encode()).hexdigest()

    def applied(self, source: str) -> str:
        """Return the source with this change."""
        return source[: self.start] + self.new + source[self.end :]


def mutations_of(file: str, source: str) -> list[Mutation]:
    """Return all changes of a file, in the order of the lines.

    Types, messages and log texts do not change.
    """
    return sorted(set(Visitor(file, source).visit_body(ast.parse(source))))


class Visitor:
    """Visits the statements of a file, and keeps track of the current function."""

    def __init__(self, file: str, source: str) -> None:
        self.file, self.source = file, source
        # The parser counts columns in bytes; offsets here count characters.
        self.lines = [line.encode() for line in source.splitlines(keepends=True)]
        self.offsets = [0]
        for line in self.lines:
            self.offsets.append(self.offsets[-1] + len(line.decode()))
        self.names: list[str] = []
        self.arguments: list[list[str]] = []

    def offset(self, line: int, column: int) -> int:
        """Return the position in the source that belongs to a line and a column of the parser."""
        return self.offsets[line - 1] + len(self.lines[line - 1][:column].decode())

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        """Return where a node begins and ends in the source."""
        return self.offset(node.lineno, node.col_offset), self.offset(node.end_lineno or 0, node.end_col_offset or 0)

    def text(self, node: ast.expr | ast.stmt) -> str:
        """Return the source of a node."""
        return self.source[slice(*self.span(node))]

    def change(self, node: ast.expr | ast.stmt, new: str | ast.AST) -> Iterator[Mutation]:
        """Yield the change that replaces a node by ``new``, unless the code stays the same."""
        start, end = self.span(node)
        old = self.source[start:end]
        text = new if isinstance(new, str) else ast.unparse(new)
        if isinstance(node, ast.expr) and isinstance(new, ast.BoolOp | ast.BinOp | ast.Compare | ast.UnaryOp | ast.IfExp | ast.Lambda):
            text = f"({text})"
        if ast.dump(ast.parse(text.strip() or "pass")) != ast.dump(ast.parse(old if isinstance(node, ast.stmt) else f"({old})")):
            yield Mutation(self.file, ".".join(self.names), node.lineno, start, end, old, text)

    def visit_body(self, node: ast.AST) -> Iterator[Mutation]:
        """Yield the changes of everything under a node."""
        for child in ast.iter_child_nodes(node):
            yield from self.visit(child)

    def visit(self, node: ast.AST) -> Iterator[Mutation]:
        """Yield the changes of a node and of everything under it."""
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield from self.function(node)
            case ast.ClassDef():
                self.names.append(node.name)
                for child in node.body:
                    yield from self.visit(child)
                self.names.pop()
            case ast.If(test=ast.Name("TYPE_CHECKING")) | ast.Assert() | ast.Raise() | ast.Import() | ast.ImportFrom():
                return
            case ast.If(test=ast.Compare(left=ast.Name("__name__"))):
                return
            case ast.AnnAssign(value=None) | ast.JoinedStr() | ast.Assign(value=ast.BinOp(op=ast.BitOr())) if not self.arguments:
                return  # the last is an alias of a type
            case ast.AnnAssign(value=None) | ast.JoinedStr():
                return
            case ast.AnnAssign(target=target, value=value) if value is not None:
                if not (isinstance(target, ast.Name) and target.id.isupper() and not self.names):
                    yield from self.visit(value)
            case ast.Expr(value=ast.Constant()):
                return
            case ast.stmt():
                yield from self.statement(node)
                yield from self.visit_body(node)
            case ast.Call():
                yield from self.call(node)
            case ast.keyword(arg="strict"):
                return  # of zip: its arguments have one length
            case ast.expr():
                yield from self.expression(node)
                yield from self.visit_body(node)
            case _:
                for condition in getattr(node, "ifs", ()):  # part of a comprehension
                    yield from self.change(condition, ast.UnaryOp(ast.Not(), condition))
                yield from self.visit_body(node)

    @staticmethod
    def is_untested(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
        """Return whether a function is not worth changing: it never runs on this machine, or it only makes
        messages."""
        decorators = {
            name.id if isinstance(name, ast.Name) else name.attr
            for one in node.decorator_list
            for name in ast.walk(one)
            if isinstance(name, ast.Name | ast.Attribute)
        }
        return bool(decorators & UNTESTED) or node.name in TEXT_METHODS

    @staticmethod
    def says_something(node: ast.Call) -> bool:
        """Return whether the arguments of a call are messages."""
        name = _name(node.func)
        return name in SPEAKING or name.endswith(("Error", "Warning"))

    def function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[Mutation]:
        """Yield the changes of a function's defaults and body."""
        if self.is_untested(node):
            return
        self.names.append(node.name)
        self.arguments.append([argument.arg for argument in node.args.args if argument.arg not in {"self", "cls"}])
        for child in [*node.args.defaults, *filter(None, node.args.kw_defaults), *node.body]:
            yield from self.visit(child)
        self.names.pop()
        self.arguments.pop()

    def statement(self, node: ast.stmt) -> Iterator[Mutation]:
        """Yield the changes of a statement as a whole."""
        match node:
            case ast.If(test=test) | ast.While(test=test):
                yield from self.change(test, ast.UnaryOp(ast.Not(), test))
                if isinstance(node, ast.If):
                    yield from self.change(test, "False")
            case ast.Return(value=value) if value is not None and self.names:
                yield from self.change(node, "return None")
                for name in self.arguments[-1]:
                    yield from self.change(node, f"return {name}")
            case ast.Expr(value=ast.Call(func=func)) if _name(func) not in SPEAKING:
                yield from self.change(node, "pass")
            case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]) | ast.AugAssign():
                yield from self.change(node, "pass")
                if isinstance(node, ast.AugAssign) and type(node.op) in ARITHMETIC:
                    yield from self.change(node, ast.AugAssign(node.target, ARITHMETIC[type(node.op)](), node.value))
            case ast.Break():
                yield from self.change(node, "continue")
            case ast.Continue():
                yield from self.change(node, "break")
            case _:
                return

    def expression(self, node: ast.expr) -> Iterator[Mutation]:
        """Yield the changes of an expression as a whole, other than a call."""
        match node:
            case ast.Compare(ops=[op]):
                for other in COMPARISONS[type(op)]:
                    yield from self.change(node, ast.Compare(node.left, [other()], node.comparators))
            case ast.BoolOp(op=op):
                yield from self.change(node, ast.BoolOp(ast.And() if isinstance(op, ast.Or) else ast.Or(), node.values))
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                yield from self.change(node, operand)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                yield from self.change(node, operand)
            case ast.BinOp(op=op) if type(op) in ARITHMETIC:
                yield from self.change(node, ast.BinOp(node.left, ARITHMETIC[type(op)](), node.right))
            case ast.IfExp():
                yield from self.change(node, ast.IfExp(node.test, node.orelse, node.body))
            case ast.Constant(value=bool() as value):
                yield from self.change(node, repr(not value))
            case ast.Constant(value=int() as value):
                yield from self.change(node, repr(value + 1))
                if value > 0:
                    yield from self.change(node, repr(value - 1))
            case ast.Constant(value=float() as value):
                yield from self.change(node, repr(value * 2 if value else 1.0))
            case ast.Name(id=name) if name in OPPOSITE and isinstance(node.ctx, ast.Load):
                yield from self.change(node, OPPOSITE[name])
            case ast.Attribute(value=value, attr=name) if name in OPPOSITE and isinstance(node.ctx, ast.Load):
                yield from self.change(node, ast.Attribute(value, OPPOSITE[name], ast.Load()))
            case _:
                return

    def call(self, node: ast.Call) -> Iterator[Mutation]:
        """Yield the changes of a call: exchanged arguments, a dropped keyword, and changes of the parts of
        the call."""
        if self.says_something(node):
            return
        if (name := _name(node.func)) in {"isinstance", "issubclass", "cast", "TypeVar"}:
            yield from self.visit(node.args[0])
            return
        if len(node.args) >= 2 and name not in COMMUTATIVE and not any(isinstance(one, ast.Starred) for one in node.args[:2]):
            other = deepcopy(node)
            other.args[0], other.args[1] = other.args[1], other.args[0]
            yield from self.change(node, other)
        for position, keyword in enumerate(node.keywords):
            if keyword.arg is not None and keyword.arg != "strict" and len(node.args) + len(node.keywords) > 1:
                other = deepcopy(node)
                del other.keywords[position]
                yield from self.change(node, other)
        yield from self.visit_body(node)


def _name(function: ast.expr) -> str:
    """Return the last part of the name of a called function."""
    return function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""


def one_of_each_line(mutations: Sequence[Mutation], seed: int) -> list[Mutation]:
    """Return at most one mutation of each line of a file. The seed determines which ones, and their random
    order."""
    first: dict[tuple[str, int], Mutation] = {}
    for mutation in sorted(mutations, key=lambda mutation: mutation.rank(seed)):
        first.setdefault((mutation.file, mutation.line), mutation)
    return list(first.values())
