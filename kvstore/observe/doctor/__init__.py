"""``kvstore doctor``: `table` lists its checks, `report` runs them and writes the report."""
