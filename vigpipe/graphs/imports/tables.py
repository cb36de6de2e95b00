"""Read tables with a row for each node or edge, some rows at a time: csv, tsv, parquet, objects."""

import csv
import gzip
import io
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from vigpipe.errors import InputError
from vigpipe.files.arrow import need_pyarrow, reading_arrow
from vigpipe.files.names import escaped, first_few
from vigpipe.files.untrusted import opened

_AT_ONCE = 1 << 20  # cells
_ADVICE = "save it as UTF-8 csv with the names of the columns in its first line"

Chunk = list[Sequence[str]]  # the texts of some columns, in some rows; empty cells are ""


class Table(Protocol):
    """Rows of texts, in columns that have names."""

    where: str  # what messages begin with
    columns: tuple[str, ...]

    def chunks(self, names: Sequence[str]) -> Iterator[Chunk]:
        """Yield the rows of some columns, some at a time, from the first one on at each call."""
        ...


def open_table(path: Path) -> Table:
    """Open a table: .parquet, .csv or .tsv, which may be compressed (.gz)."""
    table = _Parquet(path) if path.suffix == ".parquet" else _Csv(path)
    for name in table.columns:
        if not name or table.columns.count(name) > 1:
            what = "is there twice" if name else "has no name"
            raise InputError(f"{path}: the column '{escaped(name)}' {what}; {_ADVICE}")
    return table


def check_columns(table: Table, names: Sequence[str], advice: str) -> None:
    """Raise InputError if a table lacks a column."""
    for name in names:
        if name not in table.columns:
            raise InputError(
                f"{table.where}: has the columns {first_few(table.columns, 20)}, and no "
                f"'{escaped(name)}'; {advice}"
            )


class Rows(Table):
    """A table in memory, with the texts of each column."""

    def __init__(self, where: str, texts: Mapping[str, Sequence[str]]) -> None:
        self.where, self.columns, self._texts = where, tuple(texts), texts

    def chunks(self, names: Sequence[str]) -> Iterator[Chunk]:
        yield [self._texts[name] for name in names]


class _Csv(Table):
    def __init__(self, path: Path) -> None:
        self.where, self._path = str(path), path
        with self._rows() as rows:
            self.columns = tuple(name.strip() for name in next(filter(None, rows), ()))

    @contextmanager
    def _rows(self) -> Iterator[Iterator[list[str]]]:
        is_packed = self._path.suffix == ".gz"
        suffix = (self._path.with_suffix("") if is_packed else self._path).suffix
        try:
            with opened(self._path) as plain, gzip.GzipFile(fileobj=plain) as unpacked:
                content: Any = unpacked if is_packed else plain
                text = io.TextIOWrapper(content, "utf-8-sig", newline="")
                yield csv.reader(text, delimiter="\t" if suffix == ".tsv" else ",", strict=True)
        except (csv.Error, UnicodeDecodeError, EOFError, zlib.error, OSError) as error:
            raise InputError(
                f"{self.where}: cannot be read as a table ({escaped(str(error))}); {_ADVICE}"
            ) from error

    def chunks(self, names: Sequence[str]) -> Iterator[Chunk]:
        places, width, done = [self.columns.index(name) for name in names], len(self.columns), 0
        with self._rows() as reader:
            next(filter(None, reader), None)
            while some := list(islice(reader, max(1, _AT_ONCE // width))):
                rows = [row for row in some if row]  # without empty lines
                for number, row in enumerate(rows, done + 1):
                    if len(row) != width:
                        raise InputError(
                            f"{self.where}: row {number} after the names has {len(row)} cells, "
                            f"expected {width}; mend it"
                        )
                done += len(rows)
                columns = list(zip(*rows, strict=True)) or [()] * width
                yield [columns[place] for place in places]


class _Parquet(Table):
    def __init__(self, path: Path) -> None:
        need_pyarrow(path)
        self.where, self._path = str(path), path
        with opened(path) as file, reading_arrow(path, _ADVICE):
            import pyarrow.parquet as pq

            self.columns = tuple(pq.ParquetFile(file).schema_arrow.names)

    def chunks(self, names: Sequence[str]) -> Iterator[Chunk]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        rows = max(1, _AT_ONCE // max(1, len(names)))
        with opened(self._path) as file, reading_arrow(self._path, _ADVICE):
            for batch in pq.ParquetFile(file).iter_batches(rows, columns=list(names)):
                columns = (batch.column(name).cast(pa.string()) for name in names)
                yield [column.fill_null("").to_pylist() for column in columns]
