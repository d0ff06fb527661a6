"""A data set on disk: plan, records, verification, removal, report."""
