"""One SQL statement on a live PostgreSQL database, for the workers of database_diagnosis: it can read, and not for long.

The database is named by the environment variable MINIPS_DSN (a psycopg connection string); "{id}" in it stands for the row's id,
so that every incident can have a database of its own. Needs the package psycopg (version 3), loaded when first used.
"""

from __future__ import annotations

import os
import re

from ..errors import MinipsError, brief

DSN = "MINIPS_DSN"
ROWS = 50  # shown of a result
CELL = 200  # characters shown of a value
TIMEOUT_MS = 5000
_READING = ("select", "with", "values", "table", "show", "explain")
_COMMENT = re.compile(r"\A(?:\s+|--[^\n]*(?:\n|\Z)|/\*.*?\*/|\()*", re.DOTALL)


def dsn_for(row: str) -> str:
    """The connection string for the incident `row`.

    MinipsError where none is given, psycopg is missing, the database does not answer, or its role is a superuser, whose SELECT
    could read and write the server's files.
    """
    dsn = os.environ.get(DSN, "").strip()
    if not dsn:
        raise MinipsError(
            f"database_diagnosis asks a live PostgreSQL database: set {DSN} to its connection string; "
            "the task database_synthetic needs none and runs everywhere"
        )
    dsn = dsn.replace("{id}", row)
    _connect(dsn).close()
    return dsn


def run_query(dsn: str, sql: str) -> str:
    """The rows of one reading statement as text, fields parted by " | "; a fault comes back as a line that starts with "error:".

    The transaction is read-only and undone, the time limited to TIMEOUT_MS, the rows to ROWS. MinipsError as in `dsn_for`.
    """
    first = re.match(r"[A-Za-z]*", sql[_COMMENT.match(sql).end() :])[0].lower()
    if first not in _READING:
        return f"error: {first.upper() or 'this'} is not allowed; allowed: {', '.join(_READING).upper()}"
    connection = _connect(dsn)
    try:
        with connection.cursor() as cursor:
            return _table(cursor, sql)
    except _psycopg().Error as error:
        return f"error: {_line(error)}"
    finally:
        connection.close()  # without a commit: whatever it was is undone


def _connect(dsn: str):
    """A connection whose transactions only read, of a role that is no superuser."""
    psycopg = _psycopg()
    options = f"-c statement_timeout={TIMEOUT_MS} -c idle_in_transaction_session_timeout={2 * TIMEOUT_MS}"
    try:
        connection = psycopg.connect(dsn, connect_timeout=5, options=options)
        connection.read_only = True
        superuser = connection.execute("SELECT rolsuper FROM pg_roles WHERE rolname = session_user").fetchone()[0]
    except psycopg.Error as error:
        raise MinipsError(f"{DSN}: the database cannot be reached ({_line(error)})") from None
    if superuser:
        connection.close()
        raise MinipsError(
            f"{DSN}: its role is a superuser, expected one that only reads "
            "(CREATE ROLE watcher LOGIN; GRANT pg_monitor, pg_read_all_data TO watcher)"
        )
    return connection


def _table(cursor, sql: str) -> str:
    """Run the statement and show its first rows. Streamed: the others are never fetched, and a second statement is refused."""
    rows = []
    for row in cursor.stream(sql.encode("utf-8", "replace")):
        rows.append(row)
        if len(rows) > ROWS:
            break
    lines = [" | ".join(column.name for column in cursor.description or ())]
    lines += [" | ".join(_cell(value) for value in row) for row in rows[:ROWS]]
    return "\n".join([*lines, f"(the first {ROWS} rows; there are more)" if len(rows) > ROWS else f"({len(rows)} rows)"])


def _cell(value: object) -> str:
    text = "" if value is None else " ".join(str(value).split())
    return text if len(text) <= CELL else text[: CELL - 3] + "..."


def _line(error: Exception) -> str:
    return brief(" ".join(str(error).split()) or type(error).__name__, 300)


def _psycopg():
    try:
        import psycopg
    except ImportError:
        raise MinipsError("database_diagnosis needs the package psycopg: pip install 'psycopg[binary]'") from None
    return psycopg
