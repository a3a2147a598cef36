"""Rows of a CSV trace, numbered as an editor shows them (the header is row 1)."""

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path

from serving.workload.trace import TraceError


def csv_rows(path: Path, columns: Sequence[str]) -> Iterator[tuple[int, dict[str, str] | str]]:
    """Each row by its header's names; a row with too few or too many fields comes as a text.

    Raises:
        TraceError: the header lacks one of `columns`, or a row is no CSV at all.
    """
    with path.open(newline="", encoding="utf-8-sig", errors="replace") as file:
        reader = csv.reader(file)
        header = [name.strip() for name in next(reader, [])]
        for column in columns:
            if column not in header:
                raise TraceError(f"{path}: row 1: the header is {header}, expected a column {column!r}")
        try:
            for fields in reader:
                if not fields:
                    continue
                good = len(fields) == len(header)
                yield reader.line_num, dict(zip(header, fields, strict=True)) if good else ",".join(fields)
        except csv.Error as error:
            raise TraceError(f"{path}: row {reader.line_num}: {error}, expected a row of CSV") from None
