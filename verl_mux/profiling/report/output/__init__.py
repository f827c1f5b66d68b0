"""The report as JSON, tables, page, pictures and trace, from an Analysis and its findings."""
