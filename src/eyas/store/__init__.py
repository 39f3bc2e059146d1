"""The data set on disk: shards, records, plan, reader, verify. `docs/format.md` is its contract."""
