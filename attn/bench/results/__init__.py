"""What was measured: lines, tables and reports."""
