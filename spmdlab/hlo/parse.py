"""HLO text to `Program`.  Strict: what is not understood is an `HloError` with its line number."""

import re
from collections.abc import Iterator, Mapping

from spmdlab.errors import HloError
from spmdlab.hlo.program import Computation, Frame, Instruction, Program
from spmdlab.hlo.shapes import parse_shape
from spmdlab.hlo.validate import validate

_HEADER = re.compile(r"^HloModule\s+([^\s,]+)")
_COMPUTATION = re.compile(r"^(ENTRY\s+)?%?([\w.\-]+)\s*(?:\(.*)?\{\s*$")
_START = re.compile(r"^\s*(ROOT\s+)?%?([\w.\-]+)\s+=\s+")
_OPCODE = re.compile(r"\s*([a-z][\w\-]*)\(")
# A quote that is not closed takes all that follows, so that no text is scanned twice.
_TOKEN = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?$)|[()\[\]{},]')
_KEY = re.compile(r"\s*([\w\-.]+)=")
_OPERAND = re.compile(r"%([\w.\-]+)\s*$|(?:^|\s)([A-Za-z_][\w.\-]*)\s*$")
_COMMENT = re.compile(r"/\*[^*]*\*/")
_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
_ENTRY_LINE = re.compile(r"^(\d+)\s+(.*)$")
_NUMBER = re.compile(r"[0-9]{1,6}")
_FIELD = re.compile(r"(\w+)=(-?\d{1,9})\b")
_ALIAS = re.compile(r"\{(\d{0,6})\}: \((\d{1,6}),")
_OPEN, _CLOSE = "([{", ")]}"
# Instructions whose parentheses hold a literal, not operands.
_LITERAL = frozenset({"constant", "parameter", "iota", "partition-id", "replica-id", "infeed"})
_MAX_LITERAL_LINES = 10_000


def parse(text: str) -> Program:
    """Parses an HLO module printed as text (``compiled.as_text()`` or an XLA dump).

    Raises:
        HloError: The text is not HLO, is cut short, or has a form not understood here; the
            message starts with the line number.
    """
    lines = text.splitlines()
    first = next((n for n, line in enumerate(lines) if line.strip() and line[:2] != "//"), None)
    if first is None:
        raise HloError("the HLO text is empty")
    header = _HEADER.match(lines[first])
    if not header:
        raise HloError(
            f"line {first + 1}: expected 'HloModule NAME', got {lines[first][:60]!r}; "
            "give the text of an HLO module (compiled.as_text(), or a dump ending in .txt)"
        )
    return _Parser(lines, first, header[1]).run()


class _Parser:
    """Walks the lines once."""

    def __init__(self, lines: list[str], first: int, name: str) -> None:
        self.lines = lines
        self.first = first
        self.name = name
        self.tables: dict[str, dict[int, str]] = {table: {} for table in _TABLES}

    def run(self) -> Program:
        computations: dict[str, Computation] = {}
        entry: Computation | None = None
        number = self.first + 1
        table: str | None = None
        while number < len(self.lines):
            line = self.lines[number]
            if not line.strip() or line.startswith("//"):
                table = None if not line.strip() else table
            elif line.strip() in _TABLES:
                table = line.strip()
            elif table and (row := _ENTRY_LINE.match(line)):
                self.tables[table][int(row[1][:12])] = row[2]
            elif found := _COMPUTATION.match(line):
                computation, number = self._computation(found[2], bool(found[1]), number + 1)
                if computation.name in computations:
                    raise HloError(f"line {number}: computation {found[2][:80]!r} is defined twice")
                computations[computation.name] = computation
                if computation.is_entry:
                    if entry is not None:
                        raise HloError(f"line {number}: a second ENTRY, {found[2][:80]!r}")
                    entry = computation
            else:
                raise HloError(f"line {number + 1}: not understood: {line.strip()[:80]!r}")
            number += 1
        if entry is None:
            raise HloError("the HLO text has no ENTRY computation: it is cut short, or no module")
        _check_called(computations)
        header = self.lines[self.first]
        program = Program(
            name=self.name,
            computations=computations,
            entry=entry,
            frames=self._frames(),
            num_partitions=_header_int(header, "num_partitions"),
            num_replicas=_header_int(header, "replica_count"),
            is_scheduled="is_scheduled=true" in header,
            aliases=_aliases(header),
        )
        validate(program)
        return program

    def _computation(self, name: str, is_entry: bool, number: int) -> tuple[Computation, int]:
        start = number
        instructions: list[Instruction] = []
        seen: set[str] = set()
        while number < len(self.lines):
            line = self.lines[number]
            if line.startswith("}"):
                if not instructions:
                    raise HloError(f"line {start}: computation {name[:80]!r} is empty")
                return Computation(name, instructions, is_entry), number
            if line.strip():
                instruction, number = self._instruction(number)
                for operand in instruction.operands:
                    if operand not in seen:
                        raise HloError(
                            f"line {number + 1}: {instruction.name[:80]!r} reads {operand[:80]!r}, "
                            "which is not defined before it in its computation"
                        )
                if instruction.name in seen:
                    raise HloError(f"line {number + 1}: {instruction.name[:80]!r} is defined twice")
                seen.add(instruction.name)
                instructions.append(instruction)
            number += 1
        raise HloError(
            f"the HLO text ends inside computation {name[:80]!r} (line {start}): it is cut short"
        )

    def _instruction(self, number: int) -> tuple[Instruction, int]:
        """Reads one instruction; literals and attributes may run over several lines."""
        line, first = self.lines[number], number
        head = _START.match(line)
        if not head:
            raise HloError(f"line {number + 1}: not an instruction: {line.strip()[:80]!r}")
        split = _split(line, head.end(), first)
        while split is None:
            line, number = self._continued(line, number)
            split = _split(line, head.end(), first)
        shape_text, opcode, inner, tail = split
        try:
            shape = parse_shape(shape_text)
        except HloError as error:
            raise HloError(f"line {first + 1}: {error}") from None
        operands, literal = _operands(opcode, inner, first)
        attributes = _attributes(tail, first)
        if opcode == "parameter" and not _NUMBER.fullmatch(literal):
            raise HloError(f"line {first + 1}: parameter number {literal[:20]!r} is not a number")
        instruction = Instruction(
            name=head[2],
            opcode=opcode,
            shape=shape,
            operands=operands,
            literal=literal,
            attributes=attributes,
            is_root=bool(head[1]),
            line_number=first + 1,
        )
        return instruction, number

    def _continued(self, line: str, number: int) -> tuple[str, int]:
        """``line`` with the lines after it up to where its brackets may be closed."""
        first, parts, depth = number, [line], _depth(line)
        while depth > 0:
            number += 1
            if number >= len(self.lines) or number - first > _MAX_LITERAL_LINES:
                break
            added = self.lines[number].strip()
            if added == "}" or _START.match(added):
                break
            parts.append(added)
            depth += _depth(added)
        else:
            if number > first:
                return " ".join(parts), number
        raise HloError(f"line {first + 1}: the instruction is not closed: {line.strip()[:60]!r}")

    def _frames(self) -> dict[int, Frame]:
        files, functions, locations, stacks = (self.tables[table] for table in _TABLES)
        frames: dict[int, Frame] = {}
        for key, row in stacks.items():
            fields = dict(_FIELD.findall(row))
            place = int(fields.get("file_location_id", 0))
            location = dict(_FIELD.findall(locations.get(place, "")))
            frames[key] = Frame(
                file=files.get(int(location.get("file_name_id", 0)), "").strip('"'),
                line=int(location.get("line", 0)),
                function=functions.get(int(location.get("function_name_id", 0)), "").strip('"'),
                # A root frame's parent is itself, or one above the table.
                parent=int(fields.get("parent_frame_id", 0)) - _PARENT_OFFSET,
            )
        return frames


# Parent ids are printed one higher than the row they point to (0 would mean "none").
_PARENT_OFFSET = 1


def _header_int(header: str, key: str) -> int:
    found = re.search(rf"\b{key}=(\d{{1,9}})", header)
    return int(found[1]) if found else 1


def _aliases(header: str) -> dict[int, int]:
    start = header.find("input_output_alias={")
    end = _matching(header, header.find("{", start)) if start >= 0 else None
    pairs = _ALIAS.findall(header, start, end) if end else []
    return {int(output or 0): int(parameter) for output, parameter in pairs}


def _split(line: str, start: int, number: int) -> tuple[str, str, str, str] | None:
    """Shape, opcode, text between the parentheses, attribute text; None if not closed."""
    if line.startswith("(", start):
        end = _matching(line, start)
        if end is None:
            return None
        end += 1
    else:
        end = line.find(" ", start)
        if end < 0:
            return None
    opcode = _OPCODE.match(line, end)
    if not opcode:
        raise HloError(f"line {number + 1}: no opcode in {line.strip()[:80]!r}")
    close = _matching(line, opcode.end() - 1)
    if close is None:
        return None
    tail = line[close + 1 :]
    if not _is_closed(tail):
        return None
    return line[start:end], opcode[1], line[opcode.end() : close], tail


def _is_closed(text: str) -> bool:
    """Whether every bracket of ``text`` is closed: attributes may hold JSON over several lines."""
    if text.count("{") == text.count("}") and text.count("(") == text.count(")"):
        return True
    depth = 0
    for token in _TOKEN.finditer(text):
        first = text[token.start()]
        depth += (first in _OPEN) - (first in _CLOSE)
    return depth <= 0


def _depth(line: str) -> int:
    """Brackets opened less brackets closed; strings are skipped."""
    firsts = [line[token.start()] for token in _TOKEN.finditer(line)]
    return sum(first in _OPEN for first in firsts) - sum(first in _CLOSE for first in firsts)


def _matching(line: str, start: int) -> int | None:
    """Position of the bracket that closes the one at ``start``; strings are skipped."""
    depth = 0
    for token in _TOKEN.finditer(line, start):
        first = line[token.start()]
        if first in _OPEN:
            depth += 1
        elif first in _CLOSE:
            depth -= 1
            if depth == 0:
                return token.start()
    return None


def _top_level(text: str) -> Iterator[str]:
    """The parts of ``text`` between commas that stand outside brackets and strings."""
    depth = start = 0
    for token in _TOKEN.finditer(text):
        first = text[token.start()]
        if first in _OPEN:
            depth += 1
        elif first in _CLOSE:
            depth -= 1
        elif first == "," and depth == 0:
            yield text[start : token.start()]
            start = token.end()
    yield text[start:]


def _operands(opcode: str, inner: str, line: int) -> tuple[tuple[str, ...], str]:
    if opcode in _LITERAL or not inner.strip():
        return (), inner.strip()
    names: list[str] = []
    for part in _top_level(_COMMENT.sub("", inner)):
        found = _OPERAND.search(part)
        if not found:
            raise HloError(f"line {line + 1}: operand {part.strip()[:60]!r} names no instruction")
        names.append(found[1] or found[2])
    return tuple(names), ""


def _attributes(tail: str, line: int) -> Mapping[str, str]:
    attributes: dict[str, list[str]] = {}
    last = ""
    for part in _top_level(tail):
        if not part.strip():
            continue
        key = _KEY.match(part)
        if key:
            last = key[1]
            attributes[last] = [part[key.end() :].strip()]
        elif last:  # e.g. device_ids=(...) after a mesh, written without a key of its own
            attributes[last].append(part)
        else:
            raise HloError(f"line {line + 1}: attribute {part.strip()[:60]!r} has no name")
    return {name: ",".join(parts) for name, parts in attributes.items()}


def _check_called(computations: Mapping[str, Computation]) -> None:
    for computation in computations.values():
        for instruction in computation.instructions:
            for name in instruction.called:
                if name not in computations:
                    raise HloError(
                        f"line {instruction.line_number}: {instruction.name[:80]!r} calls "
                        f"{name[:80]!r}, which the text lacks"
                    )
