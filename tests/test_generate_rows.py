"""The table of row ids: nothing is lost as it grows, and a row costs what it may cost."""

from __future__ import annotations

import pytest

from eyas.generate.rows import Known, RowTable
from eyas.records import digest_bytes


def test_flags_are_kept_while_the_table_grows() -> None:
    rows = RowTable()
    names = [digest_bytes(str(i).encode()) for i in range(20_000)]
    for i, name in enumerate(names):
        assert rows.add(name, Known.PLANNED) == 0
        if i % 3 == 0:
            assert rows.add(name, Known.ANSWERED) == Known.PLANNED
    assert len(rows) == len(names)
    for i, name in enumerate(names):
        assert rows.get(name) == (Known.PLANNED | Known.ANSWERED if i % 3 == 0 else Known.PLANNED)
    assert rows.get("nobody") == 0


@pytest.mark.parametrize("num_rows", [10_000, 50_000, 77_777])
def test_a_row_costs_at_most_32_bytes(num_rows: int) -> None:
    rows = RowTable()
    most = 0.0
    for i in range(num_rows):
        rows.add(str(i), Known.PLANNED)
        if i > 1000:
            most = max(most, rows.num_bytes / len(rows))
    assert most <= 32.5
