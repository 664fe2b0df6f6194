"""What every verb prints with: tables and progress in a terminal, plain lines when piped, JSON when asked for.

Answers go to standard output, progress and errors to standard error, so that a pipe carries answers alone.
"""

import json
import math
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from pydantic import BaseModel
    from rich.console import Console, RenderableType

NOT_MEASURED: Final = "–"
_GAP: Final = "  "
_WIDE_GAP: Final = 3
_LONG_WORD: Final = 20


class Screen:
    """One verb's way out."""

    def __init__(self, as_json: bool = False) -> None:
        self.as_json = as_json

    @property
    def is_terminal(self) -> bool:
        """Whether a person looks at the answers: then they may have boxes and colours."""
        return sys.stdout.isatty() and not self.as_json

    @property
    def is_live(self) -> bool:
        """Whether progress may redraw itself."""
        return sys.stderr.isatty() and not self.as_json and not self.console(progress=True).is_dumb_terminal

    def console(self, *, progress: bool = False) -> "Console":
        from rich.console import Console

        return Console(stderr=progress, highlight=False, markup=False, emoji=False)

    def json(self, value: "BaseModel | Sequence[BaseModel] | Any") -> None:
        """Print one JSON document."""
        is_unicode = (sys.stdout.encoding or "").lower().startswith("utf")
        print(json.dumps(_plain(value), indent=2, ensure_ascii=not is_unicode))

    def line(self, text: str = "") -> None:
        """Print one line of the answer."""
        print(visible(text), flush=True)

    def progress(self, text: str) -> None:
        """Print one line about what is going on; nothing under `--json`."""
        if not self.as_json:
            print(visible(text), file=sys.stderr, flush=True)

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[str]], *, title: str | None = None) -> None:
        """Print a table: boxed in a terminal, aligned columns without wrapping when piped."""
        rows = [[visible(cell) for cell in row] for row in rows]
        if self.is_terminal:
            console = self.console()
            console.print(rich_table(columns, rows, console.width, title=title))
            return
        if title:
            print(title)
        # A line is a row, to whoever reads it by lines.
        for text in plain_table(columns, [[cell.replace("\n", "\\n") for cell in row] for row in rows]):
            print(text)
        sys.stdout.flush()

    def show(self, renderable: "RenderableType") -> None:
        self.console().print(renderable)


def rich_table(columns: Sequence[str], rows: Iterable[Sequence[str]], width: int, *, title: str | None = None) -> Any:
    """Build the terminal's form of a table: cells are text, never markup, and wrapped, never cut.

    Where `width` is too narrow for its words, a table is drawn closer, and then as one small table a row.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    rows = list(rows)
    gap, widths = _WIDE_GAP, fitted_widths(columns, rows, width - 2, _WIDE_GAP)
    if widths is None:
        gap, widths = 1, fitted_widths(columns, rows, width, 1)
    if widths is None:
        return _stacked(columns, rows, title)
    table = Table(
        title=title, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False,
        padding=(0, 1 if gap > 1 else 0), show_edge=gap > 1,
    )  # fmt: skip
    for index, column in enumerate(columns):
        cells = [row[index] for row in rows]
        justify: Any = "right" if cells and all(map(_is_numeric, cells)) else "left"
        table.add_column(Text(column), justify=justify, width=widths[index], overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table


def _stacked(columns: Sequence[str], rows: Sequence[Sequence[str]], title: str | None) -> Any:
    """Each row's cells one below the other, beside their columns' names."""
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    table.title, table.title_justify = title, "left"
    for _ in range(2):
        table.add_column(overflow="fold")
    for number_of_row, row in enumerate(rows):
        if number_of_row:
            table.add_row("", "")
        for column, cell in zip(columns, row, strict=True):
            table.add_row(Text(column), Text(cell))
    return table


def fitted_widths(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int, gap: int) -> list[int] | None:
    """Share a line among the columns, none narrower than its longest word; None where they do not fit."""
    from rich.cells import cell_len

    cells = [[column, *(row[index] for row in rows)] for index, column in enumerate(columns)]
    widths = [max(map(cell_len, column)) for column in cells]
    least = [min(_LONG_WORD, max(cell_len(word) for cell in column for word in cell.split(" "))) for column in cells]
    excess = sum(widths) + gap * (len(columns) - 1) - width
    if excess > sum(widths) - sum(least):
        return None
    for _ in range(excess):
        widest = max(range(len(widths)), key=lambda index: (widths[index] > least[index], widths[index]))
        widths[widest] -= 1
    return widths


def plain_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Align columns with spaces: for pipes, logs and `grep`."""
    cells = [list(columns), *(list(row) for row in rows)]
    widths = [max(len(row[index]) for row in cells) for index in range(len(columns))]
    return [_GAP.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]


def number(value: float | int | None, digits: int = 4) -> str:
    """Write a number for people; `None` is not measured, which is neither zero nor NaN."""
    if value is None:
        return NOT_MEASURED
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if float(value).is_integer() and abs(value) < 1e15:
        return str(int(value))
    return f"{value:.{digits}g}"


def counted(count: int | None, thing: str) -> str:
    """Write so many things: `1 overflow`, `2 overflows`."""
    return f"{number(count)} {thing}" + ("" if count == 1 else "s")


def visible(text: str) -> str:
    """Show control characters by their escapes: a run's name must not steer the reader's terminal."""
    return "".join(
        character if character.isprintable() or character == "\n" else ascii(character)[1:-1] for character in text
    )


def _is_numeric(cell: str) -> bool:
    return cell == NOT_MEASURED or cell.lstrip("-").replace(".", "", 1).replace("e-", "").replace("e+", "").isdigit()


def _plain(value: Any) -> Any:
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
