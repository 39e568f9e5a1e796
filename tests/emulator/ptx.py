"""PTX text as data: kernels with their parameters, registers, and instructions in order."""

import re
from dataclasses import dataclass, field
from typing import NamedTuple

REGISTER = re.compile(r"%(p|rs|rd|r)(\d+)")
ENTRY = re.compile(r"\.entry (\S+?)\((.*?)\)[^{]*\{\n", re.DOTALL)
POINTER = r"(?: \.ptr(?: \.(?:global|shared|const|local))?(?: \.align \d+)?)?"
PARAMETER = re.compile(rf"\.param\s+(?:\.align \d+ )?\.(\w+){POINTER} (\w+?)(?:\[(\d+)\])?\s*$", re.MULTILINE)
LABEL = re.compile(r"([$\w]+):\s*")
GUARD = re.compile(r"@(!?)(%?\w+)\s+")
FLOAT = re.compile(r"0[fFdD][0-9A-Fa-f]+$")
SIZES = {"b8": 1, "u8": 1, "s8": 1, "u16": 2, "u32": 4, "s32": 4, "b32": 4, "f32": 4, "u64": 8, "s64": 8, "b64": 8}
NUMBER = re.compile(r"-?(0x[0-9A-Fa-f]+|\d+)U?$")


class Register(NamedTuple):
    slot: int
    kind: str  # "p": predicate; "rs", "r", "rd": 16, 32, 64 bits


class Number(NamedTuple):
    bits: int  # may be negative


class Special(NamedTuple):
    name: str  # such as tid.x


class Symbol(NamedTuple):
    name: str


class Vector(NamedTuple):
    items: tuple


class Address(NamedTuple):
    base: object  # Register or Symbol
    offset: int
    coordinates: tuple | None = None


class Pair(NamedTuple):
    """Two results, `value|predicate`."""

    first: object
    second: object


class Instruction(NamedTuple):
    opcode: str
    operands: tuple
    guard: tuple[Register, bool] | None  # the predicate, and whether it is negated
    line: int


class Parameter(NamedTuple):
    name: str
    size: int


@dataclass
class Program:
    name: str
    parameters: tuple[Parameter, ...]
    kinds: list[str] = field(default_factory=list)  # of the registers, by slot
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)  # name -> index of the next instruction
    compiled: object = None  # a cache, see machine


def parse(text):
    """Return the kernels of a PTX file."""
    return [_program(text, found) for found in ENTRY.finditer(text)]


def parameter_sizes(text):
    """Return the bytes of each parameter of each kernel of a PTX file, by the kernel's name."""
    return {found[1]: [parameter.size for parameter in _parameters(found[2])] for found in ENTRY.finditer(text)}


def _parameters(text):
    found = [PARAMETER.search(line.rstrip(",")) for line in text.splitlines() if line.strip()]
    return tuple(Parameter(p[2], int(p[3] or 1) * SIZES[p[1]]) for p in found)


def _program(text, found):
    begin, end, depth = found.end(), found.end(), 1
    while depth:
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        end += 1
    program = Program(found[1], _parameters(found[2]))
    _Body(program).read(text[begin : end - 1], text[:begin].count("\n") + 1)
    return program


class _Body:
    """Reads the statements of a kernel. Names that a block in braces declares are its own."""

    def __init__(self, program):
        self.program = program
        self.slots = {}
        self.scopes = [{}]
        self.blocks = 0

    def read(self, body, first):
        statement, begin = "", first
        lines = [(line, text) for line, full in enumerate(body.split("\n"), first) for text in _block_apart(full)]
        for number, (line, text) in enumerate(lines):
            if not statement:
                begin = line
                if text == "{":
                    self.blocks += 1
                    self.scopes.append(self._declared(lines[number + 1 :]))
                    text = ""
                elif text == "}":
                    self.scopes.pop()
                    text = ""
            statement += text + " " if text else ""
            statement = self._statements(statement, begin)

    def _declared(self, lines):
        """Return the new names of registers and labels that a block declares."""
        names = {}
        for _, text in lines:
            if text == "}":
                break
            if found := re.match(r"\.reg\s+\.(\w+)\s+(\w+);", text):
                names[found[2]] = self._new(found[1])
            elif found := re.match(r"(\w+):", text):
                names[found[1]] = f"{found[1]}@{self.blocks}"
        return names

    def _new(self, type_):
        kind = {"pred": "p", "b16": "rs", "b32": "r", "b64": "rd", "f32": "r", "u32": "r", "u64": "rd"}[type_]
        self.program.kinds.append(kind)
        return Register(len(self.program.kinds) - 1, kind)

    def _statements(self, text, line):
        """Read all complete statements; return the rest."""
        while True:
            text = text.lstrip()
            if found := LABEL.match(text):
                self.program.labels[self._label(found[1])] = len(self.program.instructions)
                text = text[found.end() :]
            elif ";" in text:
                statement, text = text.split(";", 1)
                self._statement(statement.strip(), line)
            else:
                return text

    def _label(self, name):
        renamed = self.scopes[-1].get(name, name)
        return renamed if isinstance(renamed, str) else name

    def _statement(self, text, line):
        if not text or text.startswith("."):
            return
        guard = None
        if found := GUARD.match(text):
            guard = (self._operand(found[2]), found[1] == "!")
            text = text[found.end() :]
        opcode, *rest = text.split(maxsplit=1)
        operands = tuple(self._operand(o) for o in _split(rest[0])) if rest else ()
        self.program.instructions.append(Instruction(opcode, operands, guard, line))

    def _operand(self, text):
        text = text.strip()
        if text == "_":
            return None
        if text.startswith("{"):
            return Vector(tuple(self._operand(o) for o in _split(text[1:-1])))
        if text.startswith("["):
            return self._address(text[1:-1])
        if "|" in text:
            return Pair(*(self._operand(o) for o in text.split("|")))
        if FLOAT.match(text):
            return Number(int(text[2:], 16))
        if NUMBER.match(text):
            return Number(int(text.removesuffix("U"), 0))
        if found := REGISTER.fullmatch(text):
            if text not in self.slots:
                self.program.kinds.append(found[1])
                self.slots[text] = Register(len(self.program.kinds) - 1, found[1])
            return self.slots[text]
        if text.startswith("%"):
            return Special(text[1:])
        declared = self.scopes[-1].get(text)
        if isinstance(declared, Register):
            return declared
        return Symbol(declared or text)

    def _address(self, text):
        parts = _split(text)
        base, _, offset = parts[0].partition("+")
        if len(parts) == 1 and NUMBER.match(base.strip()):
            raise ValueError(f"an absolute address: [{text}]")
        coordinates = self._operand(parts[1]).items if len(parts) > 1 else None
        return Address(self._operand(base), int(offset or 0), coordinates)


def _block_apart(line):
    """Return the text of a line without its comment; a block in braces on one line as a list of its statements."""
    text = line.split("//", 1)[0].strip()
    if not (text.startswith("{") and text.endswith("}") and ";" in text):
        return [text]
    return ["{", *(f"{statement.strip()};" for statement in text[1:-1].split(";") if statement.strip()), "}"]


def _split(text):
    """Split at commas outside of braces and brackets."""
    parts, depth, current = [], 0, ""
    for c in text:
        depth += (c in "{[") - (c in "}]")
        if c == "," and not depth:
            parts.append(current)
            current = ""
        else:
            current += c
    return [p.strip() for p in (*parts, current) if p.strip()]
